/* Launcher: makes the namespaces, starts the supervisor as PID 1 in them, then watches from outside.
 *
 * It ends the sandbox when the owner dies. PR_SET_PDEATHSIG would fire when the owner's *thread* that started us
 * ends, so a pidfd of the owner is watched instead. The kernel removes processes and mounts with PID 1; the only
 * thing left on a file system is the cgroup directory, which is removed here. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sandboxd.h"
#include "sys.h"

#define NAMESPACES (CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)

_Noreturn void fail(const char *stage) {
    int error = errno;
    struct outbox out = {0};
    uint8_t number[4];
    char text[256];
    int len = snprintf(text, sizeof text, "%s: %s", stage, strerror(error));
    if (len > (int)sizeof text - 1) len = sizeof text - 1;
    put_u32(number, (uint32_t)error);
    if (!outbox_frame(&out, 0, F_FAILED, 4 + (uint32_t)len) && !outbox_bytes(&out, number, 4) &&
        !outbox_bytes(&out, text, (size_t)len))
        (void)!send(SOCKET_FD, out.data, out.used, MSG_NOSIGNAL);
    _exit(1);
}

static void read_exactly(uint8_t *at, size_t len, int *passed_fd) {
    while (len) {
        char control[CMSG_SPACE(sizeof(int))];
        struct iovec io = {at, len};
        struct msghdr message = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
        ssize_t got = recvmsg(SOCKET_FD, &message, MSG_CMSG_CLOEXEC);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) _exit(1); /* the owner is gone: nobody to tell */
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        if (head && head->cmsg_type == SCM_RIGHTS) memcpy(passed_fd, CMSG_DATA(head), sizeof(int));
        at += got;
        len -= (size_t)got;
    }
}

/* Reads exactly the first frame, so that requests already behind it stay in the socket for the supervisor. */
static void read_setup(struct setup *setup, int *passed_fd) {
    uint8_t head[FRAME_HEADER];
    read_exactly(head, sizeof head, passed_fd);
    struct cursor cur = {head, head + sizeof head, false};
    struct frame frame;
    frame.len = take_u32(&cur);
    frame.id = take_u32(&cur);
    frame.type = take_u32(&cur);
    uint8_t *body = frame.len <= FRAME_MAX ? malloc(frame.len + 1u) : NULL;
    errno = EPROTO;
    if (!body) fail("set-up frame");
    read_exactly(body, frame.len, passed_fd);
    frame.body = body; /* kept: the set-up points into it */
    if (parse_setup(&frame, setup)) fail("set-up frame");
}

static int write_text(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t done = write(fd, text, strlen(text));
    int error = errno;
    close(fd);
    errno = error;
    return done == (ssize_t)strlen(text) ? 0 : -1;
}

/* A user namespace with these maps. It needs one member while the maps are written; the descriptor keeps it alive. */
static int make_userns(const char *uid_map, const char *gid_map) {
    pid_t holder = (pid_t)syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
    if (holder < 0) fail("new user namespace");
    if (holder == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) pause();
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/uid_map", (int)holder);
    if (write_text(path, uid_map)) fail("uid_map");
    snprintf(path, sizeof path, "/proc/%d/gid_map", (int)holder);
    if (write_text(path, gid_map)) fail("gid_map");
    snprintf(path, sizeof path, "/proc/%d/ns/user", (int)holder);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail("user namespace descriptor");
    kill(holder, SIGKILL);
    waitpid(holder, NULL, 0);
    return fd;
}

/* Files of a layer belong to whoever made it; an id-mapped mount lets the command's user own them inside. */
static void map_layers(const struct setup *setup, struct identity *id) {
    uid_t uid = 0;
    gid_t gid = 0;
    int last = -1;
    for (size_t i = 0; i < setup->num_layers; i++) {
        struct stat info;
        if (stat(setup->layers[i], &info)) fail(setup->layers[i]);
        id->layer_map_fd[i] = -1;
        if (setup->numbers[N_FLAGS] & FLAG_NO_IDMAP) continue;
        if (last < 0 || info.st_uid != uid || info.st_gid != gid) {
            char uids[64], gids[64];
            uid = info.st_uid;
            gid = info.st_gid;
            snprintf(uids, sizeof uids, "%u %u 1\n", uid, OUTSIDE_COMMAND);
            snprintf(gids, sizeof gids, "%u %u 1\n", gid, OUTSIDE_COMMAND);
            last = make_userns(uids, gids);
        }
        id->layer_map_fd[i] = last;
    }
}

static void enter_as_root(const struct setup *setup, struct identity *id) {
    char map[64];
    snprintf(map, sizeof map, "0 %u 1\n%u %u 1\n", OUTSIDE_SUPERVISOR, COMMAND_ID, OUTSIDE_COMMAND);
    id->userns_fd = make_userns(map, map);
    map_layers(setup, id);
}

static void enter_as_user(void) {
    char map[64];
    uid_t uid = geteuid();
    gid_t gid = getegid();
    if (unshare(NAMESPACES | CLONE_NEWUSER)) fail("new namespaces");
    if (write_text("/proc/self/setgroups", "deny")) fail("setgroups");
    snprintf(map, sizeof map, "%u %u 1\n", COMMAND_ID, uid);
    if (write_text("/proc/self/uid_map", map)) fail("uid_map");
    snprintf(map, sizeof map, "%u %u 1\n", COMMAND_ID, gid);
    if (write_text("/proc/self/gid_map", map)) fail("gid_map");
}

/* Returns when the sandbox is gone; kills it when the owner is, or when it overruns its lease by five seconds. */
static void watch(pid_t supervisor, int owner_fd, uint64_t lease_ms) {
    int child_fd = sys_pidfd_open(supervisor);
    struct pollfd fds[2] = {{.fd = child_fd, .events = POLLIN}, {.fd = owner_fd, .events = POLLIN}};
    int limit = lease_ms > 0x7fff0000u ? -1 : (int)lease_ms + 5000;
    int ready;
    while ((ready = poll(fds, 2, limit)) < 0 && errno == EINTR) {}
    if (ready <= 0 || child_fd < 0 || fds[1].revents) kill(supervisor, SIGKILL);
    while (waitpid(supervisor, NULL, 0) < 0 && errno == EINTR) {}
}

int main(void) {
    static struct setup setup;
    static struct sandbox box = {.copy_from_fd = -1, .join_fd = -1, .oom_fd = -1, .upper_fd = -1, .scratch_fd = -1};
    syscall(SYS_close_range, SOCKET_FD + 1, ~0u, 0);
    setsid(); /* a Ctrl-C in the owner's terminal must not reach the sandbox */
    umask(022);
    (void)!chdir("/");
    read_setup(&setup, &box.copy_from_fd);
    box.setup = &setup;
    int owner_fd = sys_pidfd_open((pid_t)setup.numbers[N_OWNER]);
    if (owner_fd < 0 || getppid() != (pid_t)setup.numbers[N_OWNER]) _exit(1);
    box.id.real_root = geteuid() == 0 && !(setup.numbers[N_FLAGS] & FLAG_USERNS);
    if (box.id.real_root) enter_as_root(&setup, &box.id);
    if (box.id.real_root && unshare(NAMESPACES)) {
        if (errno != EPERM) fail("new namespaces");
        box.id.real_root = false; /* root without CAP_SYS_ADMIN, as in an unprivileged container */
    }
    if (!box.id.real_root) enter_as_user();
    int alive[2];
    if (pipe2(alive, O_CLOEXEC)) fail("pipe");
    pid_t supervisor = fork();
    if (supervisor < 0) fail("fork");
    if (supervisor == 0) {
        close(alive[1]);
        close(owner_fd);
        box.alive_fd = alive[0];
        build_root(&box);
        become_supervisor(&box);
        supervise(&box);
    }
    close(SOCKET_FD); /* only the supervisor may hold it: the owner sees its end as end of file */
    close(alive[0]);
    watch(supervisor, owner_fd, setup.numbers[N_LEASE_MS]);
    return 0;
}
