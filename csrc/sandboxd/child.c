/* One command, file read or file write: all three run in a child with a command's rights, so that a hostile link,
 * FIFO or full disk meets the same limits, and the supervisor never blocks on the sandbox's files. */
#include "sandboxd.h"
#define ARGUMENT_MAX (96u << 10) /* the kernel takes 128 KiB per argument; a longer script goes through a file */
#define SCRIPT_FD 3
#define SCRIPT_PATH "/proc/self/fd/3"

static _Noreturn void stop(const char *what, const char *name) {
    dprintf(2, "sandbox: cannot %s %s: %s\n", what, name, strerror(errno));
    _exit(126);
}

/* This and the next two return an errno, 0 on success: it becomes the exit status. */
static int pump(int from, int to) {
    static char buffer[256 << 10];
    for (;;) {
        ssize_t got = read(from, buffer, sizeof buffer);
        if (got == 0) return 0;
        if (got < 0) return errno;
        errno = ENOSPC; /* what a short write means */
        if (write(to, buffer, (size_t)got) != got) return errno;
    }
}

static int read_out(const char *path) {
    struct stat info;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info)) return errno;
    if (S_ISDIR(info.st_mode)) return EISDIR;
    return S_ISREG(info.st_mode) ? pump(fd, 1) : EINVAL; /* a FIFO or device never ends */
}

static int write_in(const char *path) {
    char part[4096];
    struct stat info;
    if (strlen(path) >= sizeof part) return ENAMETOOLONG;
    for (const char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        memcpy(part, path, (size_t)(slash - path));
        part[slash - path] = 0;
        if (mkdir(part, 0755) && errno != EEXIST && errno != EROFS) return errno;
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_CLOEXEC, 0644);
    if (fd < 0 || fstat(fd, &info)) return errno;
    return S_ISREG(info.st_mode) ? pump(0, fd) : EINVAL;
}

static void store_script(const char *text) {
    int fd = sys_memfd("script");
    ssize_t len = (ssize_t)strlen(text);
    if (fd < 0 || write(fd, text, (size_t)len) != len) stop("store", "the script");
    if (dup2(fd, SCRIPT_FD) < 0) stop("store", "the script"); /* was the owner's socket, which no command may have */
}

static _Noreturn void run(const struct sandbox *box, const struct exec_request *request, uint64_t tag, const int *io) {
    const char *shell = box->setup->shell, *slash = strrchr(shell, '/');
    bool script = request->kind == EXEC_SHELL && strlen(request->text) > ARGUMENT_MAX;
    sigset_t none;
    setsid();
    if (dup2(io[0], 0) < 0 || dup2(io[1], 1) < 0 || dup2(io[2], 2) < 0) _exit(126);
    if (script) store_script(request->text);
    if (become_command(box, tag)) stop("drop", "rights");
    syscall(NR_close_range, script ? SCRIPT_FD + 1 : 3, ~0u, 0);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (chdir(request->cwd)) {
        if (request->kind == EXEC_SHELL) stop("enter", request->cwd);
        _exit(errno);
    }
    if (request->kind == EXEC_READ) _exit(read_out(request->text));
    if (request->kind == EXEC_WRITE) _exit(write_in(request->text));
    const char *const direct[] = {slash ? slash + 1 : shell, "-c", request->text, NULL};
    const char *const from_file[] = {direct[0], SCRIPT_PATH, NULL};
    execve(shell, (char *const *)(uintptr_t)(script ? from_file : direct), box->setup->env);
    stop("run", shell);
}

/* We move into a fresh UTS namespace and leave it for the next command; what this one starts cannot leave it. In a
 * container the child gets a group of its own instead. 0 with errno when there is no tag to be had. */
static uint64_t next_tag(const struct sandbox *box) {
    static uint32_t groups;
    if (box->container) return FIRST_TAG_GROUP + groups++ % NUM_TAG_GROUPS;
    return unshare(CLONE_NEWUTS) ? 0 : own_tag(box);
}

int start_child(const struct sandbox *box, const struct exec_request *request, int stdin_fd, struct child *out) {
    int pipes[2][2] = {{-1, -1}, {-1, -1}}, null = -1;
    out->pid = -1;
    if (!pipe2(pipes[0], O_CLOEXEC) && !pipe2(pipes[1], O_CLOEXEC) && (out->tag = next_tag(box))) {
        if (stdin_fd < 0) stdin_fd = null = open("/dev/null", O_RDONLY | O_CLOEXEC);
        const int io[] = {stdin_fd, pipes[0][1], pipes[1][1]};
        out->pid = fork();
        if (out->pid == 0) run(box, request, out->tag, io);
    }
    int error = errno;
    if (null >= 0) close(null);
    for (int i = 0; i < 2; i++) {
        if (pipes[i][1] >= 0) close(pipes[i][1]);
        if (pipes[i][0] >= 0) fcntl(pipes[i][0], F_SETFL, O_NONBLOCK);
    }
    out->out_fd = pipes[0][0];
    out->err_fd = pipes[1][0]; /* the caller closes both, also after a failure */
    errno = error;
    return out->pid < 0 ? -1 : 0;
}
