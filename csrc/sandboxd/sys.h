/* Linux interfaces that libc headers (musl's above all) may lack. The numbers are the same on every architecture. */
#ifndef SWE_SYS_H
#define SWE_SYS_H

#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    NR_io_uring_setup = 425, NR_open_tree = 428, NR_move_mount, NR_fsopen, NR_fsconfig, NR_fsmount,
    NR_pidfd_open = 434, NR_clone3, NR_close_range, NR_mount_setattr = 442,
};

#define TREE_CLONE 1u
#define TREE_CLOEXEC 02000000u
#define RECURSIVE 0x8000u
#define EMPTY_PATH 0x1000u
#define MOVE_EMPTY_FROM 4u
#define FS_CLOEXEC 1u
#define FS_SET_STRING 1u
#define FS_CREATE 6u
#define ATTR_RDONLY 0x1u
#define ATTR_NOSUID 0x2u
#define ATTR_NODEV 0x4u
#define ATTR_NOEXEC 0x8u
#define ATTR_IDMAP 0x00100000u

static inline int sys_mount_setattr(int dir, unsigned flags, uint64_t set, uint64_t userns_fd) {
    struct { uint64_t set, clear, propagation, userns_fd; } attributes = {set, 0, 0, userns_fd};
    return (int)syscall(NR_mount_setattr, dir, "", flags | EMPTY_PATH, &attributes, sizeof attributes);
}
static inline int sys_pidfd_open(pid_t pid) { return (int)syscall(NR_pidfd_open, pid, 0); }
static inline int sys_memfd(const char *name) { return (int)syscall(SYS_memfd_create, name, 1 /* close on exec */); }

#endif
