/* Parts of the launcher and the supervisor. One static binary: nothing is executed between them, so that the
 * supervisor keeps the capabilities of its user namespace and a start costs one exec. */
#ifndef SWE_SANDBOXD_H
#define SWE_SANDBOXD_H

#include <dirent.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "frame.h"

#define SOCKET_FD 3

/* Who is who. Inside, the supervisor is 0 (root case) and commands are always COMMAND_ID. Outside:
 *   started by root:  two unprivileged ids of the range that Debian reserves; real root is left before any command;
 *   started by a user: both are that user (a user may map only himself). */
#define COMMAND_ID 1000u
#define OUTSIDE_SUPERVISOR 65520u
#define OUTSIDE_COMMAND 65521u

struct identity {
    bool real_root;    /* mounts are made as real root, the user namespace is joined afterwards */
    int userns_fd;     /* real root: the namespace to join */
    int layer_map_fd[MAX_LAYERS]; /* real root: maps a layer's owner to OUTSIDE_COMMAND; -1: not used */
};

struct sandbox {
    const struct setup *setup;
    struct identity id;
    int copy_from_fd; /* upper directory of the sandbox this one is forked from, or -1 */
    int alive_fd;     /* readable (end of file) when the launcher is gone; one byte: the cgroup is joined */
    int join_fd;      /* cgroup.procs, or -1 */
    int oom_fd;       /* memory.events or memory.oom_control, or -1 */
    int upper_fd;     /* own upper directory */
    int scratch_fd;   /* a directory on the size-capped tmpfs, for statfs */
    DIR *proc;        /* own /proc */
    int sysctl_fd;    /* /proc/sys before it became read-only */
};

/* launcher.c: reports `stage` and errno to the owner and exits. */
_Noreturn void fail(const char *stage);

/* rootfs.c: builds the whole file system and pivots into it. */
void build_root(struct sandbox *box);

/* copytree.c */
int copy_tree(int from, int to, bool trusted_xattr, bool give_to_command);
int give_tree_to_command(int dir);

/* privileges.c */
void become_supervisor(struct sandbox *box);
int become_command(const struct sandbox *box); /* in the child; -1 with errno */

/* child.c: forks a command of its own UTS namespace, which marks all its descendants; -1 with errno. */
struct child {
    pid_t pid;
    int out_fd, err_fd; /* read ends, non-blocking */
    uint64_t tag;       /* inode of the UTS namespace */
};
int start_child(const struct sandbox *box, const struct exec_request *request, int stdin_fd, struct child *out);

/* procs.c */
struct census {
    unsigned processes, threads; /* beside the supervisor */
    uint64_t rss_bytes;
};
uint64_t own_tag(const struct sandbox *box);
void take_census(const struct sandbox *box, struct census *out);
uint64_t total_pss(const struct sandbox *box);
/* Sends SIGKILL to every process with the tag but the spared ones; returns how many were seen. */
unsigned kill_tagged(const struct sandbox *box, uint64_t tag, const pid_t *spared, size_t num_spared);

/* supervisor.c */
_Noreturn void supervise(struct sandbox *box);

#endif
