/* Who may do what: the supervisor keeps six capabilities of its user namespace, a command keeps none. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "sandboxd.h"
#include "sys.h"

#define CAP(number) (1u << (number))
/* KILL, SETGID, SETUID, SYS_PTRACE (read /proc/PID/ns), SYS_ADMIN (a UTS namespace per command), SYS_RESOURCE */
#define SUPERVISOR_CAPS (CAP(5) | CAP(6) | CAP(7) | CAP(19) | CAP(21) | CAP(24))

static int set_capabilities(uint32_t low) {
    struct { uint32_t version; int pid; } header = {0x20080522, 0};
    struct { uint32_t effective, permitted, inheritable; } data[2] = {{low, low, 0}, {0, 0, 0}};
    return (int)syscall(SYS_capset, &header, data);
}

static void write_sysctl(const struct sandbox *box, const char *name, const char *value) {
    int fd = openat(box->sysctl_fd, name, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return; /* a second line of defence: the system call filter refuses the same */
    (void)!write(fd, value, strlen(value));
    close(fd);
}

void become_supervisor(struct sandbox *box) {
    char pages[32];
    if (box->real_root) {
        int fd = openat(dirfd(box->proc), "self/oom_score_adj", O_WRONLY | O_CLOEXEC);
        if (fd >= 0) {
            (void)!write(fd, "-1000", 5); /* in a full cgroup the kernel must pick a command, not PID 1 */
            close(fd);
        }
        if (syscall(SYS_setns, box->userns_fd, CLONE_NEWUSER)) fail("join user namespace");
        if (setgroups(0, NULL) || setresgid(0, 0, 0) || setresuid(0, 0, 0)) fail("supervisor identity");
    }
    snprintf(pages, sizeof pages, "%llu", (unsigned long long)(box->setup->numbers[N_MEMORY] / 4096));
    write_sysctl(box, "kernel/shmall", pages);
    write_sysctl(box, "user/max_user_namespaces", "0");
    for (unsigned long cap = 0; cap < 64; cap++) prctl(PR_CAPBSET_DROP, cap, 0, 0, 0);
    if (set_capabilities(SUPERVISOR_CAPS)) fail("capabilities");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) fail("no_new_privs");
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)) fail("dumpable"); /* /proc/1 is closed to commands of the same user */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)) fail("parent death signal"); /* last: changes of identity clear it */
}

/* ---- system call filter ------------------------------------------------------------------------------------ */

struct bpf_step { uint16_t code; uint8_t yes, no; uint32_t value; };
struct bpf_program { unsigned short len; struct bpf_step *steps; };

#define BPF_LOAD 0x20        /* accumulator = 32 bits of seccomp_data at value */
#define BPF_IF_EQUAL 0x15
#define BPF_IF_AT_LEAST 0x35
#define BPF_IF_ANY_BIT 0x45
#define BPF_RETURN 0x06
#define ALLOW 0x7fff0000u
#define ERROR(number) (0x00050000u | (number))

#if defined(__x86_64__)
#define NATIVE_ARCH 0xC000003Eu
#elif defined(__aarch64__)
#define NATIVE_ARCH 0xC00000B7u
#elif defined(__riscv) && __riscv_xlen == 64
#define NATIVE_ARCH 0xC00000F3u
#endif

#define NEW_NAMESPACES (0x7C020000u | 0x00000080u) /* all CLONE_NEW* */

static int filter_system_calls(bool allow_memfd) {
#ifdef NATIVE_ARCH
    static const uint32_t refused[] = {SYS_unshare, SYS_setns, SYS_mount, SYS_umount2, SYS_pivot_root, NR_open_tree,
                                       NR_move_mount, NR_fsopen, NR_mount_setattr, SYS_bpf, SYS_perf_event_open,
                                       SYS_userfaultfd, SYS_keyctl, SYS_add_key, SYS_request_key};
    static const uint32_t absent[] = {NR_clone3, NR_io_uring_setup, SYS_memfd_create};
    struct bpf_step steps[64];
    size_t n = 0;
    steps[n++] = (struct bpf_step){BPF_LOAD, 0, 0, 4};
    steps[n++] = (struct bpf_step){BPF_IF_EQUAL, 1, 0, NATIVE_ARCH};
    steps[n++] = (struct bpf_step){BPF_RETURN, 0, 0, ERROR(ENOSYS)};
    steps[n++] = (struct bpf_step){BPF_LOAD, 0, 0, 0};
    steps[n++] = (struct bpf_step){BPF_IF_AT_LEAST, 0, 1, 0x40000000u}; /* x32 numbers */
    steps[n++] = (struct bpf_step){BPF_RETURN, 0, 0, ERROR(ENOSYS)};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        steps[n++] = (struct bpf_step){BPF_IF_EQUAL, 0, 1, refused[i]};
        steps[n++] = (struct bpf_step){BPF_RETURN, 0, 0, ERROR(EPERM)};
    }
    /* memfd pages are in no process's resident size: without a cgroup nothing would count them */
    for (size_t i = 0; i < sizeof absent / sizeof *absent - (allow_memfd ? 1 : 0); i++) {
        steps[n++] = (struct bpf_step){BPF_IF_EQUAL, 0, 1, absent[i]};
        steps[n++] = (struct bpf_step){BPF_RETURN, 0, 0, ERROR(ENOSYS)};
    }
    steps[n++] = (struct bpf_step){BPF_IF_EQUAL, 0, 3, SYS_clone};
    steps[n++] = (struct bpf_step){BPF_LOAD, 0, 0, 16}; /* flags: the first argument */
    steps[n++] = (struct bpf_step){BPF_IF_ANY_BIT, 0, 1, NEW_NAMESPACES};
    steps[n++] = (struct bpf_step){BPF_RETURN, 0, 0, ERROR(EPERM)};
    steps[n++] = (struct bpf_step){BPF_RETURN, 0, 0, ALLOW};
    struct bpf_program program = {(unsigned short)n, steps};
    return prctl(PR_SET_SECCOMP, 2, &program, 0, 0);
#else
    (void)allow_memfd;
    return 0; /* no capabilities and no nested user namespace still hold */
#endif
}

static void limit(int what, rlim_t value) {
    struct rlimit now, wanted = {value, value};
    if (!getrlimit(what, &now) && now.rlim_max < value) wanted.rlim_cur = wanted.rlim_max = now.rlim_max;
    (void)setrlimit(what, &wanted);
}

int become_command(const struct sandbox *box) {
    if (box->real_root) {
        prctl(PR_SET_DUMPABLE, 1, 0, 0, 0); /* makes the file below our own; exec decides again */
        int fd = openat(dirfd(box->proc), "self/oom_score_adj", O_WRONLY | O_CLOEXEC);
        if (fd >= 0) {
            (void)!write(fd, "0", 1);
            close(fd);
        }
    }
    limit(RLIMIT_CORE, 0);
    limit(RLIMIT_NOFILE, 4096);
    limit(RLIMIT_MEMLOCK, 64 << 10);
    limit(RLIMIT_MSGQUEUE, 1 << 20);
    limit(RLIMIT_RTPRIO, 0);
    /* Counted per user namespace, so per sandbox. A user's own supervisor and launcher count as two. */
    limit(RLIMIT_NPROC, box->setup->numbers[N_PIDS] + (box->real_root ? 0 : 2));
    if (setresgid(COMMAND_ID, COMMAND_ID, COMMAND_ID) || setresuid(COMMAND_ID, COMMAND_ID, COMMAND_ID)) return -1;
    if (set_capabilities(0)) return -1;
    return filter_system_calls(box->join_fd >= 0);
}
