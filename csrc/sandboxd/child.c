/* One command, file read or file write: all three run in a child with a command's rights, so that a hostile link,
 * FIFO or full disk meets the same limits, and the supervisor never blocks on the sandbox's files. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sandboxd.h"
#include "sys.h"

#define ARGUMENT_MAX (96u << 10) /* the kernel takes 128 KiB per argument; a longer script goes through a file */
#define SCRIPT_FD 3

static _Noreturn void stop(const char *what, const char *name) {
    int error = errno;
    dprintf(2, "sandbox: %s %s: %s\n", what, name, strerror(error));
    _exit(126);
}

static int write_all(int fd, const void *bytes, size_t len) {
    for (const char *at = bytes; len;) {
        ssize_t done = write(fd, at, len);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return -1;
        at += done;
        len -= (size_t)done;
    }
    return 0;
}

static int pump(int from, int to) {
    static char buffer[256 << 10];
    for (;;) {
        ssize_t got = read(from, buffer, sizeof buffer);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return (int)got;
        if (write_all(to, buffer, (size_t)got)) return -1;
    }
}

/* The exit status of these two is an errno, 0 on success. */
static int read_out(const char *path) {
    struct stat info;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info)) return errno;
    if (S_ISDIR(info.st_mode)) return EISDIR;
    if (!S_ISREG(info.st_mode)) return EINVAL; /* a FIFO or device never ends */
    return pump(fd, 1) ? errno : 0;
}

static int write_in(const char *path) {
    char part[4096];
    if (strlen(path) >= sizeof part) return ENAMETOOLONG;
    for (const char *slash = strchr(path + (*path == '/'), '/'); slash; slash = strchr(slash + 1, '/')) {
        memcpy(part, path, (size_t)(slash - path));
        part[slash - path] = 0;
        if (mkdir(part, 0755) && errno != EEXIST && errno != EROFS) return errno;
    }
    struct stat info;
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_CLOEXEC, 0644);
    if (fd < 0 || fstat(fd, &info)) return errno;
    if (!S_ISREG(info.st_mode)) return EINVAL;
    if (pump(0, fd)) return errno;
    return close(fd) ? errno : 0;
}

static void script_file(const struct exec_request *request) {
    int fd = sys_memfd("script");
    if (fd < 0 || write_all(fd, request->text, strlen(request->text))) stop("cannot store", "the script");
    if (fd == SCRIPT_FD ? fcntl(fd, F_SETFD, 0) : dup2(fd, SCRIPT_FD) < 0) stop("cannot store", "the script");
}

static _Noreturn void run(const struct sandbox *box, const struct exec_request *request, int in, int out, int err) {
    const struct setup *setup = box->setup;
    sigset_t none;
    setsid();
    if (dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) _exit(126);
    bool script = request->kind == EXEC_SHELL && strlen(request->text) > ARGUMENT_MAX;
    if (script) script_file(request);
    if (become_command(box)) stop("cannot drop", "rights");
    syscall(NR_close_range, script ? SCRIPT_FD + 1 : 3, ~0u, 0);
    signal(SIGPIPE, SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (chdir(request->cwd)) {
        if (request->kind != EXEC_SHELL) _exit(errno);
        stop("cannot enter", request->cwd);
    }
    if (request->kind == EXEC_READ) _exit(read_out(request->text));
    if (request->kind == EXEC_WRITE) _exit(write_in(request->text));
    const char *base = strrchr(setup->shell, '/');
    char *plain[] = {(char *)(uintptr_t)(base ? base + 1 : setup->shell), "-c", (char *)(uintptr_t)request->text, NULL};
    char *from_file[] = {plain[0], "/proc/self/fd/3", NULL};
    execve(setup->shell, script ? from_file : plain, setup->env);
    stop("cannot run", setup->shell);
}

int start_child(const struct sandbox *box, const struct exec_request *request, int stdin_fd, struct child *out) {
    int pipes[2][2];
    if (pipe2(pipes[0], O_CLOEXEC)) return -1;
    if (pipe2(pipes[1], O_CLOEXEC)) {
        close(pipes[0][0]);
        close(pipes[0][1]);
        return -1;
    }
    /* We move into a fresh UTS namespace and leave it for the next command; what this one starts cannot leave it. */
    out->pid = unshare(CLONE_NEWUTS) ? -1 : 0;
    out->tag = own_tag(box);
    int null = stdin_fd < 0 ? open("/dev/null", O_RDONLY | O_CLOEXEC) : -1;
    if (out->pid == 0) out->pid = fork();
    if (out->pid == 0) run(box, request, stdin_fd < 0 ? null : stdin_fd, pipes[0][1], pipes[1][1]);
    int error = errno;
    if (null >= 0) close(null);
    for (int i = 0; i < 2; i++) {
        close(pipes[i][1]);
        if (out->pid < 0) close(pipes[i][0]);
        else fcntl(pipes[i][0], F_SETFL, O_NONBLOCK);
    }
    out->out_fd = pipes[0][0];
    out->err_fd = pipes[1][0];
    errno = error;
    return out->pid < 0 ? -1 : 0;
}
