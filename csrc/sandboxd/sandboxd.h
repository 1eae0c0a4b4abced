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
#include <time.h>
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

/* Who is who. Inside, commands are COMMAND_ID or the user that an image names; the supervisor of a sandbox that root
 * started is 0, or COMMAND_ID where the commands are 0. Outside:
 *   started by root: two unprivileged ids of the range that Debian reserves; real root is left before any command;
 *   started by a user: both are that user, who may map nobody else. */
#define COMMAND_ID 1000u
#define OUTSIDE_SUPERVISOR 65520u
#define OUTSIDE_COMMAND 65521u /* also the owner of an image's files, where root imported it */
static inline uint32_t supervisor_id(uint32_t command) { return command ? 0 : COMMAND_ID; }
/* In a container no namespace can be made: a supplementary group, which only the supervisor may change, is the tag. */
#define FIRST_TAG_GROUP 20000u
#define NUM_TAG_GROUPS 40000u
#define MAX_DISKS 16

struct written {
    struct timespec since; /* of files changed after that */
    uint64_t bytes, files;
};
struct sandbox {
    const struct setup *setup;
    bool real_root;   /* mounts are made as real root, the user namespace is joined afterwards */
    bool forks_freely; /* root in a container: the kernel exempts it from RLIMIT_NPROC */
    int userns_fd;    /* real root: the namespace to join */
    int layer_map_fd[MAX_LAYERS]; /* real root: a namespace that maps a layer's owner to OUTSIDE_COMMAND; or -1 */
    int copy_from_fd; /* upper directory of the sandbox this one is forked from, or -1 */
    pid_t copier;     /* the process that copies it, or 0 */
    int copied_fd;    /* one byte: it has; end of file: it could not; -1: nothing is under way */
    int scratch_fd;   /* the size-capped tmpfs before it is mounted, or -1 */
    int alive_fd;     /* end of file: the launcher is gone; one byte: we are in the memory cgroup */
    int join_fd;      /* cgroup.procs, or -1 */
    int oom_fd;       /* memory.events or memory.oom_control, or -1 */
    int upper_fd;     /* upper directory of the overlay, on the size-capped tmpfs */
    int sysctl_fd;    /* /proc/sys before it became read-only */
    DIR *proc;        /* own /proc */
    bool container;   /* somebody else made the namespaces; see container.c */
    int disk_fds[MAX_DISKS]; /* container: the size-capped file systems */
    size_t num_disks;
    int storage_fd;   /* container: the tree on the engine's storage that commands may write, which has no size cap; or -1 */
    struct written written; /* of that tree */
    uint64_t tree_bytes; /* container: what the size-capped file systems held at the start, beside Limits.disk_bytes */
};
/* launcher.c */
_Noreturn void fail(const char *stage); /* tells the owner `stage` and errno, and exits */
void read_setup(struct setup *setup, int *passed_fd); /* *setup points into memory that is never freed */
int write_text(int dir, const char *path, const char *text); /* -1 with errno */
/* rootfs.c: the tmpfs for all that is written, and the start of the copy for a fork; any time before build_root. */
void open_scratch(struct sandbox *box);
/* Builds the whole file system and pivots into it. */
void build_root(struct sandbox *box);
/* copytree.c: the files go to the command's user if `give`. -1 with errno. */
int copy_tree(int from, int to, bool trusted_xattr, bool give);
/* Into a tree that may hold files already: what `from` has wins, its whiteouts delete. */
int merge_tree(int from, int to, uid_t owner);
/* tree.c: -1 with errno. */
int remove_entry(int dir, const char *name);
int empty_tree(int dir);
int give_tree(int dir, uid_t owner);
void measure_written(int dir, struct written *sums); /* what lies in other file systems is left out */
/* container.c */
_Noreturn void run_in_container(struct sandbox *box, struct setup *setup, char *socket_path);
int call_owner(void); /* opens SOCKET_FD again; -1 with errno */
/* privileges.c */
void become_supervisor(struct sandbox *box);
int set_capabilities(uint32_t low); /* of this process; -1 with errno */
int become_command(const struct sandbox *box, uint64_t tag); /* in the child; -1 with errno */
/* stream.c: to the owner. Losing it ends a local sandbox; in a container it is opened again. */
int64_t now_us(void); /* monotonic */
int64_t now_ms(void);
void stream_init(bool can_reopen);
int stream_fd(void); /* -1 while it is broken */
unsigned stream_losses(void); /* how often it broke so far */
size_t stream_unsent(void);
int64_t stream_retry_ms(void); /* when to try again, INT64_MAX when it is open */
void stream_flush(void);
void stream_reopen(void);
void stream_receive(void (*handle)(const struct frame *));
_Noreturn void end(const char *why); /* tells the owner why, and exits */
void send_bytes(const void *bytes, size_t len);
void send_header(uint32_t id, uint32_t type, uint32_t len);
void send_frame(uint32_t id, uint32_t type, const void *body, uint32_t len);
void send_descriptor(uint32_t id, uint32_t type, int fd);
void keep_last(uint32_t id, size_t len);
bool is_kept(uint32_t id);
void forget_kept(uint32_t id);
/* supervisor.c */
_Noreturn void supervise(struct sandbox *box);
/* child.c: starts a command; -1 with errno. */
struct child {
    pid_t pid;
    int out_fd, err_fd; /* read ends, non-blocking */
    uint64_t tag;       /* marks it and all its descendants: inode of its UTS namespace, or a supplementary group */
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
