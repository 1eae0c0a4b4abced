/* Who may do what: the supervisor keeps six capabilities of its user namespace, a command keeps none. */
#include <grp.h>
#include <stddef.h>
#include <sys/resource.h>
#include "sandboxd.h"
#define CAP(number) (1u << (number))
/* KILL, SETGID, SETUID, SYS_PTRACE (read /proc/PID/ns), SYS_ADMIN (a UTS namespace per command), SYS_RESOURCE */
#define SUPERVISOR_CAPS (CAP(5) | CAP(6) | CAP(7) | CAP(19) | CAP(21) | CAP(24))

int set_capabilities(uint32_t low) {
    struct { uint32_t version; int pid; } header = {0x20080522, 0};
    struct { uint32_t effective, permitted, inheritable; } data[2] = {{low, low, 0}, {0, 0, 0}};
    return (int)syscall(SYS_capset, &header, data);
}

void become_supervisor(struct sandbox *box) {
    char pages[32];
    snprintf(pages, sizeof pages, "%llu", (unsigned long long)(box->setup->numbers[N_MEMORY] / 4096));
    (void)write_text(box->sysctl_fd, "kernel/shmall", pages); /* of this IPC namespace */
    if (box->real_root) {
        (void)write_text(dirfd(box->proc), "self/oom_score_adj", "-1000"); /* a full cgroup must cost a command, not PID 1 */
        if (syscall(SYS_setns, box->userns_fd, CLONE_NEWUSER)) fail("join user namespace");
        uint32_t uid = supervisor_id(box->setup->uid), gid = supervisor_id(box->setup->gid);
        if (setgroups(0, NULL) || setresgid(gid, gid, gid) || setresuid(uid, uid, uid)) fail("supervisor identity");
    }
    (void)write_text(box->sysctl_fd, "user/max_user_namespaces", "0");
    for (unsigned long cap = 0; cap < 64; cap++) prctl(PR_CAPBSET_DROP, cap, 0, 0, 0);
    if (set_capabilities(SUPERVISOR_CAPS)) fail("capabilities");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) fail("no_new_privs");
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)) fail("dumpable"); /* /proc/1 is closed to commands of the same user */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)) fail("parent death signal"); /* last: changes of identity clear it */
}

struct step { uint16_t code; uint8_t yes, no; uint32_t value; }; /* one instruction of classic BPF */

/* LOAD: accumulator = 32 bits of seccomp_data at value */
enum { LOAD = 0x20, IF_EQUAL = 0x15, IF_AT_LEAST = 0x35, IF_ANY_BIT = 0x45, RETURN = 0x06 };
enum { ALLOW = 0x7fff0000, NEW_NAMESPACES = 0x7C020080 /* all CLONE_NEW* */ };
#define ERROR(number) (0x00050000u | (number))

#if defined(__x86_64__)
#define NATIVE_ARCH 0xC000003Eu
#elif defined(__aarch64__)
#define NATIVE_ARCH 0xC00000B7u
#elif defined(__riscv) && __riscv_xlen == 64
#define NATIVE_ARCH 0xC00000F3u
#else
#define NATIVE_ARCH 0u /* no filter: no capability and no nested user namespace still hold */
#endif

static size_t refuse(struct step *steps, const uint32_t *numbers, size_t count, uint32_t error) {
    for (size_t i = 0; i < count; i++) {
        steps[2 * i] = (struct step){IF_EQUAL, 0, 1, numbers[i]};
        steps[2 * i + 1] = (struct step){RETURN, 0, 0, ERROR(error)};
    }
    return 2 * count;
}

static int filter_system_calls(bool allow_memfd) {
    static const uint32_t refused[] = {SYS_unshare, SYS_setns, SYS_mount, SYS_umount2, SYS_pivot_root, NR_open_tree,
                                       NR_move_mount, NR_fsopen, NR_mount_setattr, SYS_bpf, SYS_perf_event_open,
                                       SYS_userfaultfd, SYS_keyctl, SYS_add_key, SYS_request_key};
    /* memfd pages are in no process's resident size: without a cgroup nothing would count them */
    static const uint32_t absent[] = {NR_clone3, NR_io_uring_setup, SYS_memfd_create};
    struct step steps[64] = {
        {LOAD, 0, 0, 4}, {IF_EQUAL, 1, 0, NATIVE_ARCH},    {RETURN, 0, 0, ERROR(ENOSYS)},
        {LOAD, 0, 0, 0}, {IF_AT_LEAST, 0, 1, 0x40000000u}, {RETURN, 0, 0, ERROR(ENOSYS)}, /* x32 numbers */
        {IF_EQUAL, 0, 4, SYS_clone}, {LOAD, 0, 0, 16}, {IF_ANY_BIT, 0, 1, NEW_NAMESPACES}, {RETURN, 0, 0, ERROR(EPERM)},
        {RETURN, 0, 0, ALLOW}};
    size_t n = 11;
    n += refuse(steps + n, refused, sizeof refused / sizeof *refused, EPERM);
    n += refuse(steps + n, absent, sizeof absent / sizeof *absent - allow_memfd, ENOSYS);
    steps[n++] = (struct step){RETURN, 0, 0, ALLOW};
    struct { unsigned short len; struct step *steps; } program = {(unsigned short)n, steps};
    return NATIVE_ARCH ? prctl(PR_SET_SECCOMP, 2, &program, 0, 0) : 0;
}

static void limit(int what, rlim_t value) {
    struct rlimit now, wanted = {value, value};
    if (!getrlimit(what, &now) && now.rlim_max < value) wanted.rlim_cur = wanted.rlim_max = now.rlim_max;
    (void)setrlimit(what, &wanted);
}

int become_command(const struct sandbox *box, uint64_t tag) {
    gid_t mark = (gid_t)tag;
    if (box->real_root || box->container) {
        prctl(PR_SET_DUMPABLE, 1, 0, 0, 0); /* makes the file below our own; exec decides again */
        (void)write_text(dirfd(box->proc), "self/oom_score_adj", "0");
    }
    limit(RLIMIT_CORE, 1); /* not 0: that still starts a core handler of the host; 1 is refused */
    limit(RLIMIT_NOFILE, 4096);
    limit(RLIMIT_MEMLOCK, 64 << 10);
    limit(RLIMIT_MSGQUEUE, 1 << 20);
    limit(RLIMIT_RTPRIO, 0);
    /* Only the supervisor's watch stops a bomb there, and it would get one slice among thousands. */
    if (box->forks_freely) (void)setpriority(PRIO_PROCESS, 0, 10);
    /* Counted per user namespace, so per sandbox.
     * Twice the watched limit: where forks fail first, what is alive hovers below it and the cause stays unnamed. */
    if (!box->container) limit(RLIMIT_NPROC, box->setup->numbers[N_PIDS] * 2 + 4); /* else the engine counts */
    if (box->container && setgroups(1, &mark)) return -1;
    uint32_t uid = box->setup->uid, gid = box->setup->gid;
    if (setresgid(gid, gid, gid) || setresuid(uid, uid, uid)) return -1;
    if (set_capabilities(0)) return -1;
    return filter_system_calls(box->join_fd >= 0 || box->container);
}
