/* Parts of the launcher and the supervisor. One static binary: nothing is executed between them, so that the
 * supervisor keeps the capabilities of its user namespace and a start costs one exec. */
#ifndef SWE_SANDBOXD_H
#define SWE_SANDBOXD_H
/* What most parts need; _GNU_SOURCE is a compiler flag (build.sh). */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "frame.h"
#define SOCKET_FD 3

/* Linux interfaces that libc headers (musl's above all) may lack; the numbers are the same on every architecture. */
enum { NR_io_uring_setup = 425, NR_open_tree = 428, NR_move_mount, NR_fsopen, NR_fsconfig, NR_fsmount };
enum { NR_pidfd_open = 434, NR_clone3, NR_close_range, NR_mount_setattr = 442 };
enum { TREE_CLONE = 1, TREE_CLOEXEC = 02000000, RECURSIVE = 0x8000, EMPTY_PATH = 0x1000, MOVE_EMPTY_FROM = 4 };
enum { FS_CLOEXEC = 1, FS_SET_STRING = 1, FS_CREATE = 6 };
enum { ATTR_RDONLY = 1, ATTR_NOSUID = 2, ATTR_NODEV = 4, ATTR_NOEXEC = 8, ATTR_IDMAP = 0x100000 };
static inline int sys_mount_setattr(int dir, unsigned flags, uint64_t set, uint64_t userns_fd) {
    struct { uint64_t set, clear, propagation, userns_fd; } attributes = {set, 0, 0, userns_fd};
    return (int)syscall(NR_mount_setattr, dir, "", flags | EMPTY_PATH, &attributes, sizeof attributes);
}
static inline int sys_pidfd_open(pid_t pid) { return (int)syscall(NR_pidfd_open, pid, 0); }
static inline int sys_memfd(const char *name) { return (int)syscall(SYS_memfd_create, name, 1 /* close on exec */); }

/* Who is who. Inside, commands are always COMMAND_ID, and the supervisor is 0 if root started the sandbox. Outside:
 *   started by root: two unprivileged ids of the range that Debian reserves; real root is left before any command;
 *   started by a user: both are that user, who may map nobody else. */
#define COMMAND_ID 1000u
#define OUTSIDE_SUPERVISOR 65520u
#define OUTSIDE_COMMAND 65521u

struct sandbox {
    const struct setup *setup;
    bool real_root;   /* mounts are made as real root, the user namespace is joined afterwards */
    int userns_fd;    /* real root: the namespace to join */
    int layer_map_fd[MAX_LAYERS]; /* real root: a namespace that maps a layer's owner to OUTSIDE_COMMAND; or -1 */
    int copy_from_fd; /* upper directory of the sandbox this one is forked from, or -1 */
    int alive_fd;     /* end of file: the launcher is gone; one byte: we are in the memory cgroup */
    int join_fd;      /* cgroup.procs, or -1 */
    int oom_fd;       /* memory.events or memory.oom_control, or -1 */
    int upper_fd;     /* upper directory of the overlay, on the size-capped tmpfs */
    int sysctl_fd;    /* /proc/sys before it became read-only */
    DIR *proc;        /* own /proc */
};
/* launcher.c */
_Noreturn void fail(const char *stage); /* tells the owner `stage` and errno, and exits */
int write_text(int dir, const char *path, const char *text); /* -1 with errno */
/* rootfs.c: builds the whole file system and pivots into it. */
void build_root(struct sandbox *box);
/* copytree.c: the files go to the command's user if `give`. -1 with errno. */
int copy_tree(int from, int to, bool trusted_xattr, bool give);
/* privileges.c */
void become_supervisor(struct sandbox *box);
int become_command(const struct sandbox *box); /* in the child; -1 with errno */
/* supervisor.c */
_Noreturn void supervise(struct sandbox *box);
/* child.c: starts a command; -1 with errno. */
struct child {
    pid_t pid;
    int out_fd, err_fd; /* read ends, non-blocking */
    uint64_t tag;       /* inode of its UTS namespace, which marks all its descendants */
};
int start_child(const struct sandbox *box, const struct exec_request *request, int stdin_fd, struct child *out);
/* procs.c: processes beside the supervisor. */
struct census {
    unsigned processes, threads;
    uint64_t rss_bytes;
};
pid_t next_process(const struct sandbox *box); /* 0 at the end; rewinddir(box->proc) starts over */
uint64_t own_tag(const struct sandbox *box);
void take_census(const struct sandbox *box, struct census *out, uint64_t enough); /* stops at `enough` threads */
uint64_t total_pss(const struct sandbox *box);
/* SIGKILL to every process with the tag but the spared ones; returns how many were seen. */
unsigned kill_tagged(const struct sandbox *box, uint64_t tag, const pid_t *spared, size_t num_spared);
#endif
