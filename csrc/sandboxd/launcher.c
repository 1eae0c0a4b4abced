/* Launcher: makes the namespaces, starts the supervisor as PID 1 in them, then watches from outside.
 *
 * It ends the sandbox when the owner dies. PR_SET_PDEATHSIG would fire when the owner's *thread* that started us
 * ends, so a pidfd of the owner is watched instead. The kernel removes processes and mounts with PID 1; the only
 * thing left on a file system is the cgroup directory, which is removed here. */
#include "sandboxd.h"
#define NAMESPACES (CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)

_Noreturn void fail(const char *stage) {
    struct buffer out = {0};
    uint8_t number[4];
    char text[256];
    put_u32(number, (uint32_t)errno);
    snprintf(text, sizeof text, "%s: %s", stage, strerror(errno));
    if (!outbox_frame(&out, 0, F_FAILED, 4 + (uint32_t)strlen(text)) && !outbox_add(&out, number, 4) &&
        !outbox_add(&out, text, strlen(text)))
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
void read_setup(struct setup *setup, int *passed_fd) {
    uint8_t head[FRAME_HEADER];
    struct frame frame;
    read_exactly(head, sizeof head, passed_fd);
    parse_header(head, &frame);
    uint8_t *body = frame.len <= FRAME_MAX ? malloc(frame.len + 1u) : NULL;
    errno = EPROTO;
    if (!body) fail("set-up frame");
    read_exactly(body, frame.len, passed_fd);
    frame.body = body; /* kept: the set-up points into it */
    if (parse_setup(&frame, setup)) fail("set-up frame");
}

int write_text(int dir, const char *path, const char *text) {
    int fd = openat(dir, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t done = write(fd, text, strlen(text));
    int error = errno;
    close(fd);
    errno = error;
    return done == (ssize_t)strlen(text) ? 0 : -1;
}

/* A user namespace with these maps. It needs a member while they are written; the descriptor keeps it alive after. */
static int make_userns(const char *uid_map, const char *gid_map) {
    char path[3][64];
    pid_t holder = (pid_t)syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
    if (holder < 0) fail("new user namespace");
    if (holder == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) pause();
    }
    const char *const names[] = {"uid_map", "gid_map", "ns/user"};
    for (int i = 0; i < 3; i++) snprintf(path[i], sizeof path[i], "/proc/%d/%s", (int)holder, names[i]);
    if (write_text(AT_FDCWD, path[0], uid_map) || write_text(AT_FDCWD, path[1], gid_map)) fail("user namespace maps");
    int fd = open(path[2], O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail("user namespace descriptor");
    kill(holder, SIGKILL);
    waitpid(holder, NULL, 0);
    return fd;
}

/* Files of a layer belong to whoever made it; an id-mapped mount lets the command's user own them inside. */
static void map_layers(struct sandbox *box) {
    struct stat info, last = {0};
    for (size_t i = 0; i < box->setup->num_layers; i++, last = info) {
        char uids[64], gids[64];
        box->layer_map_fd[i] = -1;
        if (box->setup->numbers[N_FLAGS] & FLAG_NO_IDMAP) continue;
        if (stat(box->setup->layers[i], &info)) fail(box->setup->layers[i]);
        snprintf(uids, sizeof uids, "%u %u 1\n", info.st_uid, OUTSIDE_COMMAND);
        snprintf(gids, sizeof gids, "%u %u 1\n", info.st_gid, OUTSIDE_COMMAND);
        bool same = i && info.st_uid == last.st_uid && info.st_gid == last.st_gid;
        box->layer_map_fd[i] = same ? box->layer_map_fd[i - 1] : make_userns(uids, gids);
    }
}

static void write_map(char *map, size_t room, uint32_t command) {
    snprintf(map, room, "%u %u 1\n%u %u 1\n", supervisor_id(command), OUTSIDE_SUPERVISOR, command, OUTSIDE_COMMAND);
}

static void enter_as_root(struct sandbox *box) {
    char uids[64], gids[64];
    box->real_root = unshare(CLONE_NEWUTS) == 0;
    if (!box->real_root && errno == EPERM) return; /* a container's root, as good as a user */
    if (!box->real_root) fail("new namespaces");
    if (box->copy_from_fd >= 0) open_scratch(box); /* the copy runs beside all that follows */
    write_map(uids, sizeof uids, box->setup->uid);
    write_map(gids, sizeof gids, box->setup->gid);
    box->userns_fd = make_userns(uids, gids);
    map_layers(box);
    if (unshare(NAMESPACES & ~CLONE_NEWUTS)) fail("new namespaces"); /* last: the next process is PID 1 there */
}

static void enter_as_user(const struct setup *setup) {
    char uids[64], gids[64];
    snprintf(uids, sizeof uids, "%u %u 1\n", setup->uid, geteuid());
    snprintf(gids, sizeof gids, "%u %u 1\n", setup->gid, getegid());
    if (unshare(NAMESPACES | CLONE_NEWUSER)) fail("new namespaces");
    if (write_text(AT_FDCWD, "/proc/self/setgroups", "deny")) fail("setgroups");
    if (write_text(AT_FDCWD, "/proc/self/uid_map", uids)) fail("uid_map");
    if (write_text(AT_FDCWD, "/proc/self/gid_map", gids)) fail("gid_map");
}

/* Returns the directory of a new memory cgroup; -1 when there is none to be had: the supervisor then only watches. */
static int make_cgroup(struct sandbox *box) {
    const struct setup *setup = box->setup;
    char limit[32];
    if (!setup->cgroup || mkdir(setup->cgroup, 0755)) return -1;
    int dir = open(setup->cgroup, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    /* what is on the tmpfs counts as memory of the group, but has its own limit */
    snprintf(limit, sizeof limit, "%llu", (unsigned long long)(setup->numbers[N_MEMORY] + setup->numbers[N_DISK]));
    if (dir < 0 || write_text(dir, setup->cgroup_limit, limit)) {
        rmdir(setup->cgroup);
        return -1;
    }
    (void)write_text(dir, "memory.swap.max", "0");                   /* version 2 */
    (void)write_text(dir, "memory.memsw.limit_in_bytes", limit); /* version 1 */
    box->oom_fd = openat(dir, "memory.events", O_RDONLY | O_CLOEXEC);
    if (box->oom_fd < 0) box->oom_fd = openat(dir, "memory.oom_control", O_RDONLY | O_CLOEXEC);
    box->join_fd = openat(dir, "cgroup.procs", O_WRONLY | O_CLOEXEC);
    return dir;
}

/* The directory of the group that bounds the share of the processors: the memory group (version 2) or a further one. */
static int make_cpu_group(const struct setup *setup) {
    char file[64];
    const char *value = setup->cpu_group ? strchr(setup->cpu_limit, ' ') : NULL;
    if (!value || value - setup->cpu_limit >= (ptrdiff_t)sizeof file) return -1;
    snprintf(file, sizeof file, "%.*s", (int)(value - setup->cpu_limit), setup->cpu_limit);
    if (mkdir(setup->cpu_group, 0755) && errno != EEXIST) return -1;
    int dir = open(setup->cpu_group, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir >= 0) (void)!write_text(dir, file, value + 1);
    return dir;
}

/* Returns when the sandbox is gone; kills it when the owner is, or when it overruns its lease by five seconds. */
static void watch(pid_t supervisor, int owner_fd, uint64_t lease_ms) {
    struct pollfd fds[2] = {{.fd = sys_pidfd_open(supervisor), .events = POLLIN}, {.fd = owner_fd, .events = POLLIN}};
    int ready, limit = lease_ms > 0x7fff0000u ? -1 : (int)lease_ms + 5000;
    while ((ready = poll(fds, 2, limit)) < 0 && errno == EINTR) {}
    if (ready <= 0 || fds[0].fd < 0 || fds[1].revents) kill(supervisor, SIGKILL);
    while (waitpid(supervisor, NULL, 0) < 0 && errno == EINTR) {}
}

static void remove_cgroup(int parent, const char *name) {
    for (int tries = 0; unlinkat(parent, name, AT_REMOVEDIR) && errno == EBUSY && tries < 100; tries++)
        usleep(10000); /* the last process is still on its way out */
}

int main(int argc, char **argv) {
    static struct setup setup;
    static struct sandbox box = {.setup = &setup, .copy_from_fd = -1, .join_fd = -1, .oom_fd = -1, .upper_fd = -1,
                                 .copied_fd = -1, .scratch_fd = -1};
    int alive[2], parent = -1, cpu_parent = -1;
    char number[16];
    syscall(NR_close_range, SOCKET_FD + 1, ~0u, 0);
    setsid(); /* a Ctrl-C in the owner's terminal must not reach the sandbox */
    umask(022);
    if (chdir("/")) fail("/");
    if (argc == 3 && strcmp(argv[1], "container") == 0) run_in_container(&box, &setup, argv[2]);
    read_setup(&setup, &box.copy_from_fd);
    int owner_fd = sys_pidfd_open((pid_t)setup.numbers[N_OWNER]);
    if (owner_fd < 0 || getppid() != (pid_t)setup.numbers[N_OWNER]) _exit(1);
    if (geteuid() == 0 && !(setup.numbers[N_FLAGS] & FLAG_USERNS)) enter_as_root(&box);
    box.forks_freely = geteuid() == 0 && !box.real_root;
    if (!box.real_root) enter_as_user(&setup);
    if (pipe2(alive, O_CLOEXEC)) fail("pipe");
    int cgroup = make_cgroup(&box);
    if (cgroup >= 0) parent = openat(cgroup, "..", O_PATH | O_DIRECTORY | O_CLOEXEC); /* pivot_root moves us too */
    int cpu = make_cpu_group(&setup);
    if (cpu >= 0) cpu_parent = openat(cpu, "..", O_PATH | O_DIRECTORY | O_CLOEXEC);
    pid_t supervisor = fork();
    if (supervisor < 0) fail("fork");
    if (supervisor == 0) {
        close(alive[1]);
        box.alive_fd = alive[0];
        build_root(&box);
        become_supervisor(&box);
        supervise(&box);
    }
    close(SOCKET_FD); /* only the supervisor may hold it: the owner sees its end as end of file */
    close(alive[0]);
    if (box.copy_from_fd >= 0) close(box.copy_from_fd);
    snprintf(number, sizeof number, "%d", (int)supervisor);
    if (cpu >= 0) (void)write_text(cpu, "cgroup.procs", number);
    if (cgroup >= 0 && write_text(cgroup, "cgroup.procs", number) == 0) /* 5 to 20 ms: beside the start, not in it */
        (void)!write(alive[1], "j", 1);
    if (box.copier) waitpid(box.copier, NULL, 0);
    watch(supervisor, owner_fd, setup.numbers[N_LEASE_MS]);
    if (parent >= 0) remove_cgroup(parent, strrchr(setup.cgroup, '/') + 1);
    if (cpu_parent >= 0) remove_cgroup(cpu_parent, strrchr(setup.cpu_group, '/') + 1);
    return 0;
}
