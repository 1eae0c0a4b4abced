/* What runs in the sandbox, read from its own /proc. */
#include <ctype.h>
#include "sandboxd.h"

pid_t next_process(const struct sandbox *box) {
    for (struct dirent *entry; (entry = readdir(box->proc));) {
        if (!isdigit((unsigned char)entry->d_name[0])) continue;
        pid_t pid = (pid_t)atoi(entry->d_name);
        if (pid > 1) return pid;
    }
    return 0;
}

static ssize_t read_proc(const struct sandbox *box, pid_t pid, const char *name, char *text, size_t room) {
    char path[64];
    snprintf(path, sizeof path, "%d/%s", (int)pid, name);
    int fd = openat(dirfd(box->proc), path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t got = read(fd, text, room - 1);
    close(fd);
    if (got >= 0) text[got] = 0;
    return got;
}

/* The supplementary group that a process in a container has; 0 when it is gone or a zombie without threads. */
static uint64_t group_of(const struct sandbox *box, pid_t pid) {
    char text[4096];
    if (read_proc(box, pid, "status", text, sizeof text) <= 0) return 0;
    const char *state = strstr(text, "\nState:"), *threads = strstr(text, "\nThreads:"), *groups = strstr(text, "\nGroups:");
    if (!state || !threads || !groups) return UINT64_MAX;
    if (strchr("ZX", state[8]) && strtoul(threads + 9, NULL, 10) <= 1) return 0;
    return strtoull(groups + 8, NULL, 10);
}

/* 0 when the process is gone or a zombie, UINT64_MAX when it is alive but unreadable. */
static uint64_t tag_of(const struct sandbox *box, pid_t pid) {
    if (box->container) return group_of(box, pid);
    char path[64], text[64];
    snprintf(path, sizeof path, "%d/ns/uts", (int)pid);
    ssize_t len = readlinkat(dirfd(box->proc), path, text, sizeof text - 1);
    if (len < 0) return errno == EACCES || errno == EPERM ? UINT64_MAX : 0;
    text[len] = 0;
    const char *number = strchr(text, '[');
    return number ? strtoull(number + 1, NULL, 10) : 0;
}

uint64_t own_tag(const struct sandbox *box) { return tag_of(box, getpid()); }

void take_census(const struct sandbox *box, struct census *out, uint64_t enough) {
    static uint64_t page;
    if (!page) page = (uint64_t)sysconf(_SC_PAGESIZE);
    memset(out, 0, sizeof *out);
    rewinddir(box->proc);
    for (pid_t pid; out->threads < enough && (pid = next_process(box));) {
        char text[1024];
        if (read_proc(box, pid, "stat", text, sizeof text) <= 0) continue;
        const char *at = strrchr(text, ')'); /* the command name may hold anything, also blanks and ')' */
        unsigned threads = 0;
        char state = 0;
        unsigned long long rss = 0;
        /* after the name: state, 16 fields, num_threads (20th of all), 3 fields, rss (24th) */
        if (!at || sscanf(at + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %u %*s %*s %*s %llu",
                          &state, &threads, &rss) != 3)
            continue;
        out->processes += state != 'Z';
        out->threads += threads ? threads : 1; /* a zombie holds one place of RLIMIT_NPROC */
        out->rss_bytes += rss * page;
    }
}

uint64_t total_pss(const struct sandbox *box) {
    uint64_t total = 0;
    rewinddir(box->proc);
    for (pid_t pid; (pid = next_process(box));) {
        char text[4096];
        if (read_proc(box, pid, "smaps_rollup", text, sizeof text) <= 0) continue;
        const char *at = strstr(text, "\nPss:");
        if (at) total += strtoull(at + 5, NULL, 10) << 10;
    }
    return total;
}

unsigned kill_tagged(const struct sandbox *box, uint64_t tag, const pid_t *spared, size_t num_spared) {
    unsigned seen = 0;
    rewinddir(box->proc);
    for (pid_t pid; (pid = next_process(box));) {
        bool spare = false;
        for (size_t i = 0; i < num_spared; i++) spare |= spared[i] == pid;
        if (spare) continue;
        uint64_t theirs = tag_of(box, pid);
        if (theirs != tag && theirs != UINT64_MAX) continue; /* unreadable ones die: nothing may hide from a limit */
        seen++;
        kill(pid, SIGKILL);
    }
    return seen;
}
