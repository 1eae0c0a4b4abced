/* Supervisor: PID 1 of the sandbox. One poll loop: frames from the owner, output of commands, deaths, deadlines.
 *
 * A command's processes carry its tag (see child.c), so its whole tree can be killed, double forks and new sessions
 * included, while background jobs of earlier commands live on. Any way out of the loop ends the sandbox: the kernel
 * kills what is left in the PID namespace. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/statfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "sandboxd.h"
#include "sys.h"

#define MAX_JOBS 64
#define READ_SIZE (64u << 10)
#define DRAIN_MS 50         /* after the leader's end, for output of what it left behind */
#define WATCH_MS 15         /* between two looks at memory, processes and disk while a command runs */
#define WATCH_IDLE_MS 200   /* the same when only background jobs run */
#define KILL_RETRY_MS 2
#define KILL_GIVE_UP_MS 2000
#define OUTBOX_FULL (1u << 20)

enum outcome { OK, NONZERO, TIMEOUT, OOM, PIDS_LIMIT, DISK_FULL, OUTPUT_LIMIT, LOST }; /* order of types.Outcome */
enum job_state { FREE, RUNNING, DRAINING, REPORTED };

struct stream {
    int fd; /* -1 at end of file */
    uint64_t total;
    uint8_t *kept;               /* [keep]: head, then a ring with the tail */
    uint32_t head_cap, tail_cap;
};

struct job {
    enum job_state state;
    uint32_t id, kind, keep;
    struct child child;
    struct stream out, err;
    uint64_t kill_bytes;
    int64_t started_us, deadline_ms, drain_ms, killed_ms;
    int status;           /* of the leader, valid from DRAINING on */
    enum outcome forced;  /* set together with killed_ms */
    bool disk_was_full;
};

struct upload {
    uint32_t id;
    int fd; /* memfd, 0: free */
};

static struct sandbox *box;
static struct job jobs[MAX_JOBS];
static struct upload uploads[MAX_JOBS];
static struct inbox inbox;
static struct outbox outbox;
static uint64_t oom_kills;

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static int64_t now_ms(void) { return now_us() / 1000; }

/* ---- sending ------------------------------------------------------------------------------------------------ */

static _Noreturn void end(const char *why) {
    (void)outbox_frame(&outbox, 0, F_ENDED, (uint32_t)strlen(why));
    (void)outbox_bytes(&outbox, why, strlen(why));
    (void)!send(SOCKET_FD, outbox.data + outbox.start, outbox.used - outbox.start, MSG_NOSIGNAL | MSG_DONTWAIT);
    _exit(0);
}

static void flush_outbox(void) {
    while (outbox.start < outbox.used) {
        ssize_t sent = send(SOCKET_FD, outbox.data + outbox.start, outbox.used - outbox.start, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
        if (sent < 0) _exit(0); /* the owner is gone */
        outbox.start += (size_t)sent;
    }
    if (outbox.cap > 4 * OUTBOX_FULL) {
        free(outbox.data);
        memset(&outbox, 0, sizeof outbox);
    }
}

static void send_frame(uint32_t id, uint32_t type, const void *body, uint32_t len) {
    if (outbox_frame(&outbox, id, type, len) || outbox_bytes(&outbox, body, len)) end("out of memory");
}

static uint32_t kept_bytes(const struct stream *s) {
    uint64_t cap = (uint64_t)s->head_cap + s->tail_cap;
    return (uint32_t)(s->total < cap ? s->total : cap);
}

static void append_kept(const struct stream *s) {
    uint32_t count = kept_bytes(s), head = count < s->head_cap ? count : s->head_cap;
    int bad = outbox_bytes(&outbox, s->kept, head);
    if (count > head) {
        uint32_t tail = count - head, first = 0; /* oldest byte of the ring */
        if (tail == s->tail_cap) first = (uint32_t)((s->total - s->head_cap) % s->tail_cap);
        bad |= outbox_bytes(&outbox, s->kept + s->head_cap + first, tail - first);
        bad |= outbox_bytes(&outbox, s->kept + s->head_cap, first);
    }
    if (bad) end("out of memory");
}

static void send_result(uint32_t id, int exit_code, enum outcome outcome, int64_t duration_us, const struct stream *out,
                        const struct stream *err) {
    uint8_t head[44];
    uint32_t out_len = kept_bytes(out), err_len = kept_bytes(err);
    put_u32(head, (uint32_t)exit_code);
    put_u32(head + 4, outcome);
    put_u64(head + 8, (uint64_t)duration_us);
    put_u64(head + 16, out->total);
    put_u64(head + 24, err->total);
    put_u32(head + 32, out_len);
    put_u32(head + 36, err_len);
    put_u32(head + 40, out->head_cap);
    if (outbox_frame(&outbox, id, F_RESULT, sizeof head + out_len + err_len) || outbox_bytes(&outbox, head, sizeof head))
        end("out of memory");
    append_kept(out);
    append_kept(err);
}

static void refuse(uint32_t id, int exit_code, const char *why) {
    struct stream none = {0};
    struct stream said = {.total = strlen(why), .kept = (uint8_t *)(uintptr_t)why, .head_cap = (uint32_t)strlen(why)};
    send_result(id, exit_code, NONZERO, 0, &none, &said);
}

/* ---- output of commands ------------------------------------------------------------------------------------- */

static void keep(struct stream *s, const uint8_t *bytes, size_t len) {
    uint64_t at = s->total;
    s->total += len;
    if (!s->kept) return;
    if (at < s->head_cap) {
        size_t part = s->head_cap - at < len ? (size_t)(s->head_cap - at) : len;
        memcpy(s->kept + at, bytes, part);
        bytes += part;
        len -= part;
        at += part;
    }
    if (len > s->tail_cap) { /* only the end of a long piece can survive in the ring */
        at += len - s->tail_cap;
        bytes += len - s->tail_cap;
        len = s->tail_cap;
    }
    while (len) {
        uint32_t place = (uint32_t)((at - s->head_cap) % s->tail_cap);
        size_t part = s->tail_cap - place < len ? s->tail_cap - place : len;
        memcpy(s->kept + s->head_cap + place, bytes, part);
        bytes += part;
        len -= part;
        at += part;
    }
}

static void mark_killed(struct job *job, enum outcome why) {
    if (job->killed_ms || job->state == FREE) return;
    job->killed_ms = now_ms();
    job->forced = why;
}

/* Reads what is there, at most `rounds` buffers; true when the pipe has nothing more at the moment. */
static bool drain(struct job *job, struct stream *s, int rounds) {
    static uint8_t buffer[READ_SIZE];
    while (s->fd >= 0 && rounds-- > 0) {
        ssize_t got = read(s->fd, buffer, sizeof buffer);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EAGAIN) return true;
        if (got <= 0) {
            close(s->fd);
            s->fd = -1;
            return true;
        }
        if (job->kind == EXEC_READ && s == &job->out && job->state != REPORTED) {
            send_frame(job->id, F_CHUNK, buffer, (uint32_t)got);
            s->total += (uint64_t)got;
        } else if (job->state == REPORTED) {
            s->total += (uint64_t)got; /* a background job: read and dropped, so that it gets no SIGPIPE */
        } else {
            keep(s, buffer, (size_t)got);
        }
        if (job->out.total + job->err.total > job->kill_bytes) mark_killed(job, OUTPUT_LIMIT);
    }
    return s->fd < 0;
}

static bool open_stream(struct stream *s, int fd, uint32_t keep_bytes) {
    memset(s, 0, sizeof *s);
    s->fd = fd;
    s->head_cap = keep_bytes - keep_bytes / 2;
    s->tail_cap = keep_bytes / 2;
    s->kept = keep_bytes ? malloc(keep_bytes) : NULL;
    return s->kept || !keep_bytes;
}

static void close_stream(struct stream *s) {
    if (s->fd >= 0) close(s->fd);
    free(s->kept);
    memset(s, 0, sizeof *s);
    s->fd = -1;
}

/* ---- life of a job ------------------------------------------------------------------------------------------ */

static bool others_alive(void) { return kill(-1, 0) == 0; }

static bool disk_is_full(void) {
    struct statfs info;
    return fstatfs(box->scratch_fd, &info) == 0 && (info.f_bavail == 0 || info.f_ffree == 0);
}

static void release(struct job *job) {
    close_stream(&job->out);
    close_stream(&job->err);
    memset(job, 0, sizeof *job);
}

static void report(struct job *job) {
    int code = WIFSIGNALED(job->status) ? 128 + WTERMSIG(job->status) : WEXITSTATUS(job->status);
    enum outcome outcome = code ? NONZERO : OK;
    if (code && (job->disk_was_full || disk_is_full())) outcome = DISK_FULL;
    if (job->killed_ms) outcome = job->forced;
    if (job->killed_ms && !code) code = 128 + SIGKILL; /* the leader had ended, its tree was killed */
    send_result(job->id, code, outcome, now_us() - job->started_us, &job->out, &job->err);
    job->state = REPORTED;
    job->killed_ms = 0;
    free(job->out.kept);
    free(job->err.kept);
    job->out.kept = job->err.kept = NULL;
}

static struct job *find_job(uint32_t id) {
    for (size_t i = 0; i < MAX_JOBS; i++)
        if ((jobs[i].state == RUNNING || jobs[i].state == DRAINING) && jobs[i].id == id) return &jobs[i];
    return NULL;
}

/* Kills the tree of a job whose time has come; true when nothing of it is left. */
static bool kill_job(struct job *job) {
    pid_t spared[MAX_JOBS];
    size_t num_spared = 0;
    for (size_t i = 0; i < MAX_JOBS; i++)
        if (&jobs[i] != job && jobs[i].state == RUNNING) spared[num_spared++] = jobs[i].child.pid;
    if (job->state == RUNNING) kill(job->child.pid, SIGKILL);
    for (int round = 0; round < 8; round++)
        if (kill_tagged(box, job->child.tag, spared, num_spared) == 0) return job->state != RUNNING;
    /* Something forks faster than it dies. This is atomic, at the price of the sandbox's other commands. */
    if (now_ms() - job->killed_ms > 100) kill(-1, SIGKILL);
    return now_ms() - job->killed_ms > KILL_GIVE_UP_MS;
}

static void advance(struct job *job) {
    int64_t now = now_ms();
    if (job->state == RUNNING && now >= job->deadline_ms) mark_killed(job, TIMEOUT);
    if (job->killed_ms && job->state != FREE) {
        if (!kill_job(job)) return;
        if (job->state == REPORTED) { /* a background job that flooded its pipe */
            release(job);
            return;
        }
        drain(job, &job->out, 64);
        drain(job, &job->err, 64);
        report(job);
    }
    if (job->state == DRAINING) {
        bool empty = drain(job, &job->out, 4) & drain(job, &job->err, 4);
        bool ended = job->out.fd < 0 && job->err.fd < 0;
        if (job->killed_ms) return;
        if (ended || (empty && now >= job->drain_ms)) report(job);
    }
    if (job->state == REPORTED && job->out.fd < 0 && job->err.fd < 0) release(job);
}

static void kill_all(enum outcome why) {
    for (size_t i = 0; i < MAX_JOBS; i++)
        if (jobs[i].state == RUNNING || jobs[i].state == DRAINING) mark_killed(&jobs[i], why);
    kill(-1, SIGKILL);
}

static void check_oom_kills(void) {
    char text[512];
    if (box->oom_fd < 0) return;
    ssize_t got = pread(box->oom_fd, text, sizeof text - 1, 0);
    if (got <= 0) return;
    text[got] = 0;
    const char *at = strstr(text, "oom_kill ");
    uint64_t count = at ? strtoull(at + 9, NULL, 10) : 0;
    if (count > oom_kills) kill_all(OOM);
    oom_kills = count;
}

static void watch_limits(void) {
    struct census census;
    take_census(box, &census);
    check_oom_kills();
    if (census.rss_bytes > box->setup->numbers[N_MEMORY] && total_pss(box) > box->setup->numbers[N_MEMORY])
        kill_all(OOM); /* resident sizes count shared pages many times: only the slower figure decides */
    if (census.threads >= box->setup->numbers[N_PIDS]) kill_all(PIDS_LIMIT);
    bool full = disk_is_full();
    for (size_t i = 0; full && i < MAX_JOBS; i++)
        if (jobs[i].state != FREE) jobs[i].disk_was_full = true;
}

static void reap(void) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
        for (size_t i = 0; i < MAX_JOBS; i++) {
            struct job *job = &jobs[i];
            if (job->state != RUNNING || job->child.pid != pid) continue;
            job->state = DRAINING;
            job->status = status;
            job->drain_ms = now_ms() + DRAIN_MS;
            check_oom_kills();
            if (others_alive()) watch_limits(); /* a fork bomb's first process ends at once */
        }
    }
}

/* ---- requests ----------------------------------------------------------------------------------------------- */

static struct upload *upload_of(uint32_t id, bool make) {
    struct upload *empty = NULL;
    for (size_t i = 0; i < MAX_JOBS; i++) {
        if (uploads[i].fd && uploads[i].id == id) return &uploads[i];
        if (!uploads[i].fd) empty = &uploads[i];
    }
    if (!make || !empty) return NULL;
    empty->fd = (int)syscall(SYS_memfd_create, "stdin", 1 /* MFD_CLOEXEC */);
    empty->id = id;
    if (empty->fd < 0) empty->fd = 0;
    return empty->fd ? empty : NULL;
}

static void add_data(const struct frame *frame) {
    struct upload *upload = upload_of(frame->id, true);
    if (!upload) end("too many uploads");
    for (uint32_t done = 0; done < frame->len;) {
        ssize_t count = write(upload->fd, frame->body + done, frame->len - done);
        if (count < 0) end("upload does not fit in memory");
        done += (uint32_t)count;
    }
}

static void start_job(const struct frame *frame) {
    struct exec_request request;
    struct job *job = NULL;
    if (parse_exec(frame, &request)) end("malformed request");
    for (size_t i = 0; i < MAX_JOBS && !job; i++)
        if (jobs[i].state == FREE) job = &jobs[i];
    struct upload *upload = upload_of(frame->id, false);
    int stdin_fd = upload ? upload->fd : -1;
    if (upload) upload->fd = 0;
    if (!job) {
        refuse(frame->id, 126, "sandbox: too many commands and background jobs\n");
    } else {
        memset(job, 0, sizeof *job);
        if (stdin_fd >= 0) lseek(stdin_fd, 0, SEEK_SET);
        job->started_us = now_us();
        if (start_child(box, &request, stdin_fd, &job->child)) {
            refuse(frame->id, 126, errno == EAGAIN ? "sandbox: process limit reached\n" : "sandbox: cannot fork\n");
        } else {
            job->state = RUNNING;
            job->id = frame->id;
            job->kind = request.kind;
            job->kill_bytes = request.kill_bytes;
            job->deadline_ms = now_ms() + request.timeout_ms;
            if (!open_stream(&job->out, job->child.out_fd, request.keep_bytes) ||
                !open_stream(&job->err, job->child.err_fd, request.keep_bytes))
                end("out of memory");
        }
    }
    if (stdin_fd >= 0) close(stdin_fd);
}

/* A descriptor travels with the bytes it is sent with, so everything before them must be out first. */
static void send_upper(uint32_t id) {
    struct pollfd ready = {.fd = SOCKET_FD, .events = POLLOUT};
    for (flush_outbox(); outbox.start < outbox.used; flush_outbox()) poll(&ready, 1, 1000);
    uint8_t head[FRAME_HEADER] = {0};
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec io = {head, sizeof head};
    struct msghdr message = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *cmsg = CMSG_FIRSTHDR(&message);
    put_u32(head + 4, id);
    put_u32(head + 8, F_UPPER);
    cmsg->cmsg_level = SOL_SOCKET;
    cmsg->cmsg_type = SCM_RIGHTS;
    cmsg->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(cmsg), &box->upper_fd, sizeof(int));
    if (sendmsg(SOCKET_FD, &message, MSG_NOSIGNAL) != sizeof head) end("cannot pass the upper directory");
}

static void handle(const struct frame *frame) {
    uint8_t number[4];
    struct census census;
    struct job *job;
    switch (frame->type) {
    case F_DATA:
        add_data(frame);
        break;
    case F_EXEC:
        start_job(frame);
        break;
    case F_KILL:
        if ((job = find_job(frame->id))) mark_killed(job, NONZERO);
        break;
    case F_PING:
        take_census(box, &census);
        put_u32(number, census.processes);
        send_frame(frame->id, F_PONG, number, sizeof number);
        break;
    case F_SNAPSHOT:
        send_upper(frame->id);
        break;
    default:
        end("unknown request");
    }
}

static void receive(void) {
    uint8_t *at;
    size_t room;
    struct frame frame;
    int more;
    if (inbox_room(&inbox, &at, &room)) end("out of memory");
    ssize_t got = recv(SOCKET_FD, at, room, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) _exit(0); /* the owner closed us or died */
    inbox_added(&inbox, (size_t)got);
    while ((more = inbox_next(&inbox, &frame)) > 0) handle(&frame);
    if (more < 0) end("malformed frame");
}

/* The launcher closed the pipe (it is gone), or wrote that we are in the memory cgroup now. */
static void launcher_says(void) {
    char byte;
    if (read(box->alive_fd, &byte, 1) <= 0) _exit(0);
}

/* ---- loop --------------------------------------------------------------------------------------------------- */

/* Milliseconds until something has to be looked at without an event. */
static int next_timeout(int64_t watch_at, int64_t lease_end) {
    int64_t now = now_ms(), at = lease_end;
    bool any = false;
    for (size_t i = 0; i < MAX_JOBS; i++) {
        const struct job *job = &jobs[i];
        if (job->state == FREE) continue;
        any = true;
        int64_t due = job->state == RUNNING ? job->deadline_ms : job->state == DRAINING ? job->drain_ms : at;
        if (job->killed_ms) due = now + KILL_RETRY_MS;
        if (due < at) at = due;
    }
    if ((any || others_alive()) && watch_at < at) at = watch_at;
    return at <= now ? 0 : at - now > 60000 ? 60000 : (int)(at - now);
}

static int64_t next_watch(void) {
    for (size_t i = 0; i < MAX_JOBS; i++)
        if (jobs[i].state == RUNNING || jobs[i].state == DRAINING) return now_ms() + WATCH_MS;
    return now_ms() + WATCH_IDLE_MS;
}

static size_t add_streams(struct pollfd *fds, size_t n) {
    bool busy = outbox.used - outbox.start > OUTBOX_FULL;
    for (size_t i = 0; i < MAX_JOBS; i++) {
        struct job *job = &jobs[i];
        if (job->state == FREE) continue;
        if (job->out.fd >= 0 && !(busy && job->kind == EXEC_READ))
            fds[n++] = (struct pollfd){.fd = job->out.fd, .events = POLLIN};
        if (job->err.fd >= 0) fds[n++] = (struct pollfd){.fd = job->err.fd, .events = POLLIN};
    }
    return n;
}

static void read_streams(const struct pollfd *fds, size_t n) {
    for (size_t k = 0; k < n; k++) {
        if (!fds[k].revents) continue;
        for (size_t i = 0; i < MAX_JOBS; i++) {
            if (jobs[i].state == FREE) continue;
            if (jobs[i].out.fd == fds[k].fd) drain(&jobs[i], &jobs[i].out, 4);
            else if (jobs[i].err.fd == fds[k].fd) drain(&jobs[i], &jobs[i].err, 4);
        }
    }
}

static int watch_deaths(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    if (sigprocmask(SIG_BLOCK, &set, NULL)) fail("signal mask");
    int fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd < 0) fail("signalfd");
    return fd;
}

void supervise(struct sandbox *self) {
    static struct pollfd fds[3 + 2 * MAX_JOBS];
    struct signalfd_siginfo info;
    box = self;
    int deaths = watch_deaths();
    int64_t lease_end = now_ms() + (int64_t)box->setup->numbers[N_LEASE_MS];
    int64_t watch_at = 0;
    uint8_t real_root[4];
    put_u32(real_root, box->id.real_root);
    send_frame(0, F_READY, real_root, sizeof real_root);
    for (;;) {
        flush_outbox();
        short wanted = outbox.start < outbox.used ? POLLIN | POLLOUT : POLLIN;
        fds[0] = (struct pollfd){.fd = SOCKET_FD, .events = wanted};
        fds[1] = (struct pollfd){.fd = deaths, .events = POLLIN};
        fds[2] = (struct pollfd){.fd = box->alive_fd, .events = POLLIN};
        size_t n = add_streams(fds, 3);
        if (poll(fds, n, next_timeout(watch_at, lease_end)) < 0 && errno != EINTR) end("poll failed");
        read_streams(fds + 3, n - 3);
        if (fds[1].revents) {
            while (read(deaths, &info, sizeof info) > 0) {}
            reap();
        }
        if (fds[2].revents) launcher_says();
        if (fds[0].revents) {
            receive();
            if (watch_at > now_ms() + WATCH_MS) watch_at = now_ms() + WATCH_MS;
        }
        if (now_ms() >= watch_at) {
            if (others_alive()) watch_limits();
            watch_at = next_watch();
        }
        for (size_t i = 0; i < MAX_JOBS; i++)
            if (jobs[i].state != FREE) advance(&jobs[i]);
        if (now_ms() >= lease_end) end("lease ended");
    }
}
