/* Linux interfaces that libc headers (musl's above all) may lack. Numbers are the same on every architecture. */
#ifndef SWE_SYS_H
#define SWE_SYS_H

#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_open_tree
#define SYS_open_tree 428
#define SYS_move_mount 429
#define SYS_fsopen 430
#define SYS_fsconfig 431
#define SYS_fsmount 432
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_clone3
#define SYS_clone3 435
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif

#define SWE_TREE_CLONE 1u
#define SWE_TREE_CLOEXEC 02000000u
#define SWE_AT_RECURSIVE 0x8000u
#define SWE_AT_EMPTY_PATH 0x1000u
#define SWE_MOVE_EMPTY_FROM 4u
#define SWE_FSOPEN_CLOEXEC 1u
#define SWE_FSCONFIG_SET_STRING 1u
#define SWE_FSCONFIG_CREATE 6u
#define SWE_ATTR_RDONLY 0x1u
#define SWE_ATTR_NOSUID 0x2u
#define SWE_ATTR_NODEV 0x4u
#define SWE_ATTR_NOEXEC 0x8u
#define SWE_ATTR_IDMAP 0x00100000u

struct swe_mount_attr {
    uint64_t attr_set, attr_clr, propagation, userns_fd;
};

static inline int sys_open_tree(int dir, const char *path, unsigned flags) {
    return (int)syscall(SYS_open_tree, dir, path, flags);
}
static inline int sys_mount_setattr(int dir, unsigned flags, uint64_t set, uint64_t userns_fd) {
    struct swe_mount_attr attr = {set, 0, 0, userns_fd};
    return (int)syscall(SYS_mount_setattr, dir, "", flags | SWE_AT_EMPTY_PATH, &attr, sizeof attr);
}
static inline int sys_pidfd_open(pid_t pid) { return (int)syscall(SYS_pidfd_open, pid, 0); }

#endif
