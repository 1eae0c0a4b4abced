/* The stream between the supervisor and the owner: what waits to be sent, what has come, and, in a container, results
 * that are kept until the owner says that they arrived, and the opening of a broken stream again. */
#include <time.h>
#include "sandboxd.h"
#define RETRY_MS 20
#define RETRY_MAX_MS 500
#define OWNER_DEAD_MS 1500 /* nobody listens for so long: the owner is gone, not its stream */

struct kept {
    struct kept *next;
    uint32_t id;
    size_t len;
    uint8_t bytes[]; /* the whole frame */
};

static struct buffer inbox, outbox;
static int fd = SOCKET_FD; /* -1 while it is broken */
static bool reopens;
static unsigned losses;
static struct kept *kept;
static int64_t refused_ms, retry_ms, delay_ms;

int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}
int64_t now_ms(void) { return now_us() / 1000; }

void stream_init(bool can_reopen) { reopens = can_reopen; }
int stream_fd(void) { return fd; }
unsigned stream_losses(void) { return losses; }
size_t stream_unsent(void) { return outbox.used - outbox.start; }
int64_t stream_retry_ms(void) { return fd < 0 ? retry_ms : INT64_MAX; }

static void drop_buffer(struct buffer *b) {
    free(b->data);
    memset(b, 0, sizeof *b);
}

/* A local sandbox lives as long as its stream. */
static void lose(void) {
    if (!reopens) _exit(0);
    losses++;
    close(fd);
    fd = -1;
    drop_buffer(&inbox);
    drop_buffer(&outbox);
    refused_ms = 0;
    delay_ms = RETRY_MS;
    retry_ms = now_ms();
}

void stream_flush(void) {
    while (fd >= 0 && outbox.start < outbox.used) {
        ssize_t sent = send(fd, outbox.data + outbox.start, outbox.used - outbox.start, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && errno == EAGAIN) return;
        if (sent < 0) return lose(); /* the owner is gone, or its end was closed */
        outbox.start += (size_t)sent;
    }
    if (fd < 0) drop_buffer(&outbox); /* answers to nobody; results are kept apart */
}

_Noreturn void end(const char *why) {
    if (!outbox_frame(&outbox, 0, F_ENDED, (uint32_t)strlen(why)) && !outbox_add(&outbox, why, strlen(why))) stream_flush();
    _exit(0);
}

void send_bytes(const void *bytes, size_t len) {
    if (outbox_add(&outbox, bytes, len)) end("out of memory");
}

void send_header(uint32_t id, uint32_t type, uint32_t len) {
    if (outbox_frame(&outbox, id, type, len)) end("out of memory");
}

void send_frame(uint32_t id, uint32_t type, const void *body, uint32_t len) {
    send_header(id, type, len);
    send_bytes(body, len);
}

/* Keeps the frame that was built last, of `len` bytes with its header. */
void keep_last(uint32_t id, size_t len) {
    if (!reopens) return;
    struct kept *one = malloc(sizeof *one + len);
    if (!one) end("out of memory");
    *one = (struct kept){kept, id, len};
    memcpy(one->bytes, outbox.data + outbox.used - len, len);
    kept = one;
}

bool is_kept(uint32_t id) {
    for (const struct kept *one = kept; one; one = one->next)
        if (one->id == id) return true;
    return false;
}

void forget_kept(uint32_t id) {
    for (struct kept **at = &kept; *at; at = &(*at)->next) {
        if ((*at)->id != id) continue;
        struct kept *one = *at;
        *at = one->next;
        free(one);
        return;
    }
}

/* Opens the broken stream again when its time has come, and sends what the owner may have missed. */
void stream_reopen(void) {
    int64_t now = now_ms();
    if (fd >= 0 || now < retry_ms) return;
    if (call_owner() == 0) {
        fd = SOCKET_FD;
        for (const struct kept *one = kept; one; one = one->next) send_bytes(one->bytes, one->len);
        return;
    }
    bool nobody = errno == ECONNREFUSED || errno == ENOENT;
    if (!nobody) refused_ms = 0;
    else if (!refused_ms) refused_ms = now;
    else if (now - refused_ms > OWNER_DEAD_MS) _exit(0);
    delay_ms = delay_ms * 2 < RETRY_MAX_MS ? delay_ms * 2 : RETRY_MAX_MS;
    retry_ms = now + delay_ms;
}

void stream_receive(void (*handle)(const struct frame *)) {
    uint8_t *at;
    size_t room;
    struct frame frame;
    int more = 0;
    if (inbox_room(&inbox, &at, &room)) end("out of memory");
    ssize_t got = recv(fd, at, room, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) return lose(); /* the owner closed us or died */
    inbox.used += (size_t)got;
    while (fd >= 0 && (more = inbox_next(&inbox, &frame)) > 0) handle(&frame);
    if (more < 0) end("malformed frame");
}

/* A descriptor travels with the bytes it is sent with, so everything before them must be out first. */
void send_descriptor(uint32_t id, uint32_t type, int passed) {
    struct pollfd ready = {.fd = fd, .events = POLLOUT};
    for (stream_flush(); outbox.start < outbox.used; stream_flush()) poll(&ready, 1, 1000);
    if (fd < 0) return;
    char control[CMSG_SPACE(sizeof(int))] = {0};
    send_header(id, type, 0);
    struct iovec io = {outbox.data + outbox.start, FRAME_HEADER};
    struct msghdr message = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *cmsg = CMSG_FIRSTHDR(&message);
    *cmsg = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(cmsg), &passed, sizeof(int));
    if (sendmsg(fd, &message, MSG_NOSIGNAL) != FRAME_HEADER) return lose();
    outbox.start += FRAME_HEADER;
}
