/* Container mode: PID 1 of a container that an engine made (Docker). The engine has set up the namespaces, the limits
 * and the mounts; this file puts the tree in place and gives up what is not needed, then supervise() serves the same
 * frames as for a local sandbox, over a socket that the owner listens on.
 *
 * The owner's directory is mounted read-only, so nothing inside can put another socket in its place; this side proves
 * who it is by the nonce of its environment, which no command can read. When the stream breaks it is opened again:
 * same nonce, same boot id. The owner's death is seen as a socket that nobody listens on. */
#include <grp.h>
#include <sys/random.h>
#include <sys/statfs.h>
#include <sys/un.h>
#include "sandboxd.h"
#define NONCE_SIZE 64
#define BOOT_ID_SIZE 32
#define ANSWER_MS 20000 /* a set-up frame must follow the greeting */
#define TMPFS_TYPE 0x01021994
#define CAP(number) (1u << (number))
/* CHOWN, DAC_OVERRIDE, FOWNER: the tree is given to the command's user, and copied for a fork. KILL, SETGID, SETUID:
 * commands. SYS_RESOURCE (24), where the engine has it: the score of the memory killer. */
#define KEPT_CAPS (CAP(0) | CAP(1) | CAP(3) | CAP(5) | CAP(6) | CAP(7))

static const char *socket_name; /* in the current directory, which nobody can move away: commands may be root in name */
static uint8_t greeting[NONCE_SIZE + BOOT_ID_SIZE];

static void make_greeting(void) {
    const char *nonce = getenv("SWE_RL_NONCE");
    uint8_t random[BOOT_ID_SIZE / 2];
    if (!nonce || strlen(nonce) != NONCE_SIZE) _exit(2);
    if (getrandom(random, sizeof random, 0) != sizeof random) _exit(2);
    memcpy(greeting, nonce, NONCE_SIZE);
    for (size_t i = 0; i < sizeof random; i++) {
        static const char digits[] = "0123456789abcdef";
        greeting[NONCE_SIZE + 2 * i] = (uint8_t)digits[random[i] >> 4];
        greeting[NONCE_SIZE + 2 * i + 1] = (uint8_t)digits[random[i] & 15];
    }
}

/* -1 with errno; never waits. The greeting fits any socket buffer. */
int call_owner(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct buffer out = {0};
    if (strlen(socket_name) >= sizeof address.sun_path) _exit(2);
    memcpy(address.sun_path, socket_name, strlen(socket_name));
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    errno = 0;
    bool bad = connect(fd, (struct sockaddr *)&address, sizeof address) != 0;
    bad = bad || outbox_frame(&out, 0, F_HELLO, sizeof greeting) || outbox_add(&out, greeting, sizeof greeting);
    bad = bad || send(fd, out.data, out.used, MSG_NOSIGNAL) != (ssize_t)out.used;
    bad = bad || fcntl(fd, F_SETFL, 0) || (fd != SOCKET_FD && dup3(fd, SOCKET_FD, O_CLOEXEC) < 0);
    int error = errno;
    free(out.data);
    if (bad || fd != SOCKET_FD) close(fd);
    errno = error;
    return bad ? -1 : 0;
}

static void first_call(void) {
    struct pollfd answer = {.fd = SOCKET_FD, .events = POLLIN};
    for (int tries = 0; call_owner() < 0; tries++) {
        if (tries == 200) _exit(3);
        usleep(10000);
    }
    if (poll(&answer, 1, ANSWER_MS) <= 0) _exit(3);
}

static int open_dir(const char *path) { return open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC); }

static bool is_tmpfs(int fd) {
    struct statfs info;
    return fstatfs(fd, &info) == 0 && info.f_type == TMPFS_TYPE;
}

static void open_disk(struct sandbox *box, const char *path) {
    int fd = box->num_disks < MAX_DISKS ? open_dir(path) : -1;
    if (fd >= 0 && is_tmpfs(fd)) box->disk_fds[box->num_disks++] = fd;
    else if (fd >= 0) close(fd);
}

/* The engine mounted empty, size-capped file systems where commands may write; full ones mean "disk_full". */
static void open_disks(struct sandbox *box) {
    const char *const places[] = {box->setup->workdir, "/tmp", "/var/tmp", "/dev/shm", "/home/agent"};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) open_disk(box, places[i]);
    for (size_t i = 0; i < box->setup->num_items; i++) /* volumes of the image */
        if (box->setup->items[i].op == OP_EMPTY) open_disk(box, box->setup->items[i].a);
}

static void make_workdir(const char *path) {
    char part[4096];
    errno = ENAMETOOLONG;
    if (strlen(path) >= sizeof part) fail("workdir");
    for (const char *slash = strchr(path + 1, '/');; slash = strchr(slash + 1, '/')) {
        size_t len = slash ? (size_t)(slash - path) : strlen(path);
        memcpy(part, path, len);
        part[len] = 0;
        if (mkdir(part, 0755) && errno != EEXIST && errno != EROFS) fail(path);
        if (!slash) return;
    }
}

/* The work directory: what the image has there, or the layers, or the tree of the sandbox this one is forked from. */
static void fill_workdir(struct sandbox *box) {
    const struct setup *setup = box->setup;
    make_workdir(setup->workdir);
    int dir = open_dir(setup->workdir);
    if (dir < 0) fail(setup->workdir);
    box->upper_fd = dir;
    if (box->copy_from_fd >= 0) {
        if (empty_tree(dir) || merge_tree(box->copy_from_fd, dir, setup->uid)) fail("copy of the work directory");
        close(box->copy_from_fd);
        return;
    }
    for (size_t i = setup->num_layers; i-- > 0;) {
        int layer = open_dir(setup->layers[i]);
        if (layer < 0 || merge_tree(layer, dir, setup->uid)) fail(setup->layers[i]);
        close(layer);
    }
    if (give_tree(dir, setup->uid)) fail("owner of the work directory");
}

static void write_files(const struct setup *setup) {
    for (size_t i = 0; i < setup->num_items; i++) {
        const struct setup_item *item = &setup->items[i];
        if (item->op != OP_FILE) continue;
        int fd = open(item->a, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0644);
        if (fd < 0 && errno == EEXIST) continue; /* the image has its own */
        if (fd < 0 || write(fd, item->b, item->len) != (ssize_t)item->len) fail(item->a);
        if (fchown(fd, setup->uid, setup->gid)) fail(item->a);
        close(fd);
    }
}

static void measure_start(struct sandbox *box) {
    bool all = box->setup->uid == 0; /* owns all that an image has, not only the work directory */
    box->storage_fd = is_tmpfs(box->upper_fd) ? -1 : all ? open_dir("/") : box->upper_fd;
    clock_gettime(CLOCK_REALTIME_COARSE, &box->written.since); /* the clock that stamps files */
    for (size_t i = 0; i < box->num_disks; i++) {
        struct statfs info;
        if (fstatfs(box->disk_fds[i], &info) == 0) box->tree_bytes += (info.f_blocks - info.f_bfree) * (uint64_t)info.f_bsize;
    }
}

static void drop_rights(const struct sandbox *box) {
    (void)write_text(dirfd(box->proc), "self/oom_score_adj", "-1000"); /* full memory must cost a command, not PID 1 */
    for (unsigned long cap = 0; cap < 64; cap++) prctl(PR_CAPBSET_DROP, cap, 0, 0, 0);
    uint32_t uid = supervisor_id(box->setup->uid), gid = supervisor_id(box->setup->gid); /* another user than commands */
    if (prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) || setgroups(0, NULL)) fail("supervisor rights");
    if (setresgid(gid, gid, gid) || setresuid(uid, uid, uid)) fail("supervisor identity");
    if (set_capabilities(KEPT_CAPS | CAP(24)) && set_capabilities(KEPT_CAPS)) fail("capabilities: the container needs those of swe_rl/sandbox/docker");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) fail("no_new_privs");
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)) fail("dumpable"); /* the nonce is in /proc/1/environ */
}

_Noreturn void run_in_container(struct sandbox *box, struct setup *setup, char *socket_path) {
    char *slash = strrchr(socket_path, '/');
    if (!slash) _exit(2);
    *slash = 0;
    if (chdir(socket_path)) _exit(2);
    socket_name = slash + 1;
    umask(022);
    box->container = true;
    box->alive_fd = -1;
    make_greeting();
    first_call();
    read_setup(setup, &box->copy_from_fd);
    if (access(setup->shell, X_OK) && access(setup->shell = "/bin/sh", X_OK)) fail("/bin/sh");
    box->proc = opendir("/proc");
    if (!box->proc) fail("/proc");
    box->oom_fd = open("/sys/fs/cgroup/memory.events", O_RDONLY | O_CLOEXEC);
    if (box->oom_fd < 0) box->oom_fd = open("/sys/fs/cgroup/memory/memory.oom_control", O_RDONLY | O_CLOEXEC);
    fill_workdir(box);
    write_files(setup);
    open_disks(box);
    measure_start(box);
    drop_rights(box);
    supervise(box);
}
