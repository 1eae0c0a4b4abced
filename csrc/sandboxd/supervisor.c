/* Supervisor: PID 1 of the sandbox. One poll loop: frames from the owner, output of commands, deaths, deadlines.
 *
 * A command's processes carry its tag (child.c), so its whole tree can be killed, double forks and new sessions
 * included, while background jobs of earlier commands live on. Any way out of the loop ends the sandbox: the kernel
 * kills what is left in the PID namespace. */
#include <netinet/in.h>
#include <sys/signalfd.h>
#include <sys/statfs.h>
#include "sandboxd.h"
#define MAX_JOBS 64
#define DRAIN_MS 50       /* after the leader's end, for output of what it left behind */
#define DRAIN_MAX_MS 2000 /* the same while processes still multiply, as in a fork bomb */
#define WATCH_MS 15       /* between two looks at memory, processes and disk while a command runs */
#define WATCH_IDLE_MS 200 /* the same when only background jobs run */
#define KILL_RETRY_MS 2
#define KILL_GIVE_UP_MS 2000
#define OUTBOX_FULL (1u << 20)
#define MEASURE_MS 500    /* between two measurements of a tree that has no size cap */
#define MEASURE_IDLE_MS 10000 /* the same when its storage does not fill */
enum outcome { OK, NONZERO, TIMEOUT, OOM, PIDS_LIMIT, DISK_FULL, OUTPUT_LIMIT }; /* order of types.Outcome */
enum job_state { FREE, UPLOADING, RUNNING, DRAINING, REPORTED };

struct stream {
    int fd; /* -1 at end of file */
    uint64_t total;
    uint8_t *kept; /* the first `head` bytes, then at least the last `tail`, at most twice as many */
    uint32_t used, head, tail;
};

struct job {
    enum job_state state;
    uint32_t id, kind;
    int stdin_fd;
    struct child child;
    struct stream out, err;
    uint64_t kill_bytes;
    int64_t started_us, deadline_ms, ended_ms, drain_ms, killed_ms;
    int status;          /* of the leader, from DRAINING on */
    unsigned processes;  /* alive when DRAINING was last looked at */
    enum outcome forced; /* valid when killed_ms is set */
    bool disk_was_full;
};

static struct sandbox *box;
static struct job jobs[MAX_JOBS];
static uint64_t oom_kills;
#define EACH_JOB(name) (struct job *name = jobs; name < jobs + MAX_JOBS; name++)

static bool active(const struct job *job) { return job->state == RUNNING || job->state == DRAINING; }
/* ---- sending ---- */
static uint32_t sent_bytes(const struct stream *s) { return s->used < s->head + s->tail ? s->used : s->head + s->tail; }
static void send_kept(const struct stream *s) {
    uint32_t count = sent_bytes(s), head = count < s->head ? count : s->head;
    if (head) send_bytes(s->kept, head);
    if (count > head) send_bytes(s->kept + s->used - (count - head), count - head);
}

/* i32 exit code, u32 outcome, u64 µs, u64 bytes of stdout and stderr in total, u32 bytes of each sent, u32 of them head.
 * A result that must not be made a second time is kept until the owner has it; a file is simply read again. */
static void send_result(uint32_t id, bool is_once, int code, enum outcome why, int64_t us, const struct stream *o,
                        const struct stream *e) {
    uint8_t head[44];
    put_u32(head, (uint32_t)code);
    put_u32(head + 4, why);
    put_u64(head + 8, (uint64_t)us);
    put_u64(head + 16, o->total);
    put_u64(head + 24, e->total);
    put_u32(head + 32, sent_bytes(o));
    put_u32(head + 36, sent_bytes(e));
    put_u32(head + 40, e->head);
    uint32_t len = sizeof head + sent_bytes(o) + sent_bytes(e);
    send_header(id, F_RESULT, len);
    send_bytes(head, sizeof head);
    send_kept(o);
    send_kept(e);
    if (is_once) keep_last(id, FRAME_HEADER + len);
}

static void refuse(uint32_t id, const char *why) {
    uint32_t len = (uint32_t)strlen(why);
    struct stream none = {0}, said = {.total = len, .kept = (uint8_t *)(uintptr_t)why, .used = len, .head = len};
    send_result(id, true, 126, NONZERO, 0, &none, &said);
}

/* ---- output of commands ---- */
static void mark_killed(struct job *job, enum outcome why) {
    if (job->killed_ms) return;
    job->killed_ms = now_ms();
    job->forced = why;
}

static void keep(struct stream *s, const uint8_t *bytes, size_t len) {
    uint32_t cap = s->head + 2 * s->tail;
    if (!s->kept && !(s->kept = malloc(cap))) end("out of memory");
    while (len) {
        size_t part = cap - s->used < len ? cap - s->used : len;
        memcpy(s->kept + s->used, bytes, part);
        bytes += part;
        len -= part;
        s->used += (uint32_t)part;
        if (s->used < cap) continue;
        memmove(s->kept + s->head, s->kept + cap - s->tail, s->tail);
        s->used = s->head + s->tail;
    }
}

/* Reads at most `rounds` buffers; true when the pipe has nothing more at the moment. */
static bool drain(struct job *job, struct stream *s, int rounds) {
    static uint8_t buffer[64 << 10];
    while (s->fd >= 0 && rounds-- > 0) {
        ssize_t got = read(s->fd, buffer, sizeof buffer);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EAGAIN) return true;
        if (got <= 0) {
            close(s->fd);
            s->fd = -1;
            return true;
        }
        s->total += (uint64_t)got;
        if (job->out.total + job->err.total > job->kill_bytes) mark_killed(job, OUTPUT_LIMIT);
        if (job->state == REPORTED) continue; /* a background job: read and dropped, so that it gets no SIGPIPE */
        if (job->kind == EXEC_READ && s == &job->out) send_frame(job->id, F_CHUNK, buffer, (uint32_t)got);
        else keep(s, buffer, (size_t)got);
    }
    return s->fd < 0;
}

/* ---- life of a job ---- */
static bool others_alive(void) { return kill(-1, 0) == 0; }
static bool is_full(int fd) {
    struct statfs info;
    return fstatfs(fd, &info) == 0 && (info.f_bavail == 0 || info.f_ffree == 0);
}
static bool disk_is_full(void) {
    bool full = is_full(box->upper_fd);
    for (size_t i = 0; i < box->num_disks; i++) full |= is_full(box->disk_fds[i]);
    return full;
}

/* Bytes written in a container, over all places. What lies on the engine's storage is measured when that storage has
 * filled a little, by whomever: each half second, at once when it fills quickly, less often when measuring takes long. */
static uint64_t disk_used(bool measure) {
    static int64_t next_ms;
    static uint64_t free_then, inodes_then;
    uint64_t used = 0, extra = 0;
    struct statfs info;
    for (size_t i = 0; i < box->num_disks; i++)
        if (fstatfs(box->disk_fds[i], &info) == 0) used += (info.f_blocks - info.f_bfree) * (uint64_t)info.f_bsize;
    if (box->storage_fd < 0) return used;
    if (fstatfs(box->storage_fd, &info)) return used + box->written.bytes;
    uint64_t free_now = info.f_bfree * (uint64_t)info.f_bsize, inodes_now = info.f_ffree;
    if (free_now > free_then) free_then = free_now; /* others freed some, which must not hide what is written now */
    bool some = free_now + (1u << 20) < free_then || inodes_now + 1024 < inodes_then;
    bool much = free_now + box->setup->numbers[N_DISK] / 4 < free_then && now_ms() > next_ms - MEASURE_MS;
    if (measure || much || (some && now_ms() > next_ms) || now_ms() > next_ms + MEASURE_IDLE_MS) {
        int64_t start = now_ms();
        measure_written(box->storage_fd, &box->written);
        next_ms = now_ms() + MEASURE_MS + 10 * (now_ms() - start);
        free_then = free_now;
        inodes_then = inodes_now;
    }
    if (box->written.files > 4096) extra = (box->written.files - 4096) * 4096; /* empty files cost inodes */
    return used + extra + box->written.bytes;
}

static uint64_t tolerated; /* bytes above the limit that are there already: what frees some must not be killed */

static bool disk_is_exceeded(void) {
    if (!box->container) return false;
    uint64_t cap = box->setup->numbers[N_DISK] + box->tree_bytes, used = disk_used(false);
    if (used <= cap) tolerated = 0;
    if (used <= cap || used <= tolerated) return false;
    tolerated = used;
    return true;
}

static void release(struct job *job) {
    if (job->out.fd >= 0) close(job->out.fd);
    if (job->err.fd >= 0) close(job->err.fd);
    free(job->out.kept);
    free(job->err.kept);
    memset(job, 0, sizeof *job);
}

static void report(struct job *job) {
    int code = WIFSIGNALED(job->status) ? 128 + WTERMSIG(job->status) : WEXITSTATUS(job->status);
    enum outcome outcome = code ? NONZERO : OK;
    if (code && (job->disk_was_full || disk_is_full())) outcome = DISK_FULL;
    if (job->killed_ms) outcome = job->forced;
    if (job->killed_ms && !code) code = 128 + SIGKILL; /* the leader had ended, its tree was killed */
    send_result(job->id, job->kind != EXEC_READ, code, outcome, now_us() - job->started_us, &job->out, &job->err);
    job->state = REPORTED;
    job->killed_ms = 0;
}

/* Kills the tree of a job whose time has come; true when nothing of it is left. */
static bool kill_job(struct job *job) {
    pid_t spared[MAX_JOBS];
    size_t num_spared = 0;
    for EACH_JOB(other)
        if (other != job && other->state == RUNNING) spared[num_spared++] = other->child.pid;
    if (job->state == RUNNING) kill(job->child.pid, SIGKILL);
    for (int round = 0; round < 3; round++)
        if (kill_tagged(box, job->child.tag, spared, num_spared) == 0) return job->state != RUNNING;
    /* Something forks faster than it dies. This is atomic, at the price of the sandbox's other commands. */
    if (now_ms() - job->killed_ms > 100) kill(-1, SIGKILL);
    return now_ms() - job->killed_ms > KILL_GIVE_UP_MS;
}

static void kill_all(enum outcome why) {
    for EACH_JOB(job)
        if (active(job)) mark_killed(job, why);
    kill(-1, SIGKILL);
}

/* Whether the kernel has killed for memory since the last look. */
static bool is_out_of_memory(void) {
    char text[512];
    ssize_t got = box->oom_fd < 0 ? 0 : pread(box->oom_fd, text, sizeof text - 1, 0);
    text[got > 0 ? got : 0] = 0;
    const char *counter = strstr(text, "oom_kill ");
    uint64_t kills = counter ? strtoull(counter + 9, NULL, 10) : 0, before = oom_kills;
    oom_kills = kills;
    return kills > before;
}

/* Returns the number of processes. */
static unsigned watch_limits(void) {
    const uint64_t *limits = box->setup->numbers;
    struct census census;
    if (is_out_of_memory()) kill_all(OOM);
    take_census(box, &census, limits[N_PIDS]);
    if (census.threads >= limits[N_PIDS]) kill_all(PIDS_LIMIT);
    else if (census.rss_bytes > limits[N_MEMORY] && total_pss(box) > limits[N_MEMORY])
        kill_all(OOM); /* resident sizes count shared pages many times: the slower figure decides */
    bool full = disk_is_full();
    for EACH_JOB(job) job->disk_was_full |= full && active(job);
    if (disk_is_exceeded()) kill_all(DISK_FULL);
    return census.processes;
}

/* The owner is slower than the disk: what it reads stays in the pipe for now. */
static bool must_wait(const struct job *job) {
    return job->kind == EXEC_READ && stream_unsent() > OUTBOX_FULL;
}

/* Whether a job whose leader has ended can be reported. Its pipes may be held by jobs it left in the background. */
static bool is_drained(struct job *job) {
    int64_t now = now_ms();
    bool empty = !must_wait(job) && drain(job, &job->out, 4);
    empty &= drain(job, &job->err, 4);
    if (job->killed_ms) return false; /* that was too much output */
    if (job->out.fd < 0 && job->err.fd < 0) return true;
    if (!empty && now >= job->drain_ms) job->drain_ms = now + KILL_RETRY_MS;
    if (now < job->drain_ms) return false;
    unsigned before = job->processes;
    job->processes = watch_limits();
    bool settled = job->processes <= before && job->processes < box->setup->numbers[N_PIDS] / 2;
    if (settled || now - job->ended_ms > DRAIN_MAX_MS) return !job->killed_ms;
    job->drain_ms = now + DRAIN_MS;
    return false;
}

static void advance(struct job *job) {
    if (job->state < RUNNING) return;
    if (job->state != DRAINING && !must_wait(job)) drain(job, &job->out, 4);
    if (job->state != DRAINING) drain(job, &job->err, 4);
    if (job->state == RUNNING && now_ms() >= job->deadline_ms) mark_killed(job, TIMEOUT);
    if (job->state == DRAINING && !job->killed_ms && is_drained(job)) report(job);
    if (job->killed_ms && kill_job(job)) {
        drain(job, &job->out, 64);
        drain(job, &job->err, 64);
        if (active(job)) report(job);
        release(job);
    }
    if (job->state == REPORTED && job->out.fd < 0 && job->err.fd < 0) release(job);
}

static void reap(void) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
        for EACH_JOB(job) {
            if (job->state != RUNNING || job->child.pid != pid) continue;
            job->state = DRAINING;
            job->status = status;
            job->ended_ms = now_ms();
            job->drain_ms = job->ended_ms + DRAIN_MS;
            if (status || others_alive()) job->processes = watch_limits(); /* a fork bomb's first process ends at once */
            else if (is_out_of_memory()) mark_killed(job, OOM); /* it did not say that its child was killed */
        }
    }
}

/* ---- requests ---- */
static struct job *find_job(uint32_t id, enum job_state state) {
    for EACH_JOB(job)
        if (job->state == state && (state == FREE || job->id == id)) return job;
    return NULL;
}

/* Sent again after the stream broke: it runs, or its result has been sent again already. */
static bool is_known(uint32_t id) {
    for EACH_JOB(job)
        if (active(job) && job->id == id) return true;
    return is_kept(id);
}

static void add_data(const struct frame *frame) {
    if (box->container && is_known(frame->id)) return;
    struct job *job = find_job(frame->id, UPLOADING);
    if (!job) {
        if (!(job = find_job(0, FREE))) return; /* its F_EXEC will be refused */
        *job = (struct job){.state = UPLOADING, .id = frame->id, .stdin_fd = sys_memfd("stdin"), .out.fd = -1, .err.fd = -1};
    }
    for (uint32_t done = 0; done < frame->len;) {
        ssize_t count = write(job->stdin_fd, frame->body + done, frame->len - done);
        if (count <= 0) end("upload does not fit in memory");
        done += (uint32_t)count;
    }
}

static void start_job(const struct frame *frame) {
    struct exec_request request;
    if (parse_exec(frame, &request)) end("malformed request");
    if (box->container && is_known(frame->id)) return;
    struct job *job = find_job(frame->id, request.has_data ? UPLOADING : FREE);
    if (!job) {
        refuse(frame->id, "sandbox: too many commands and background jobs\n");
        return;
    }
    int stdin_fd = request.has_data ? job->stdin_fd : -1;
    if (stdin_fd >= 0) lseek(stdin_fd, 0, SEEK_SET);
    if (tolerated) tolerated = disk_used(true);
    uint32_t half = request.keep_bytes / 2 ? request.keep_bytes / 2 : 1;
    *job = (struct job){.state = RUNNING, .id = frame->id, .kind = request.kind, .kill_bytes = request.kill_bytes};
    job->started_us = now_us();
    job->deadline_ms = now_ms() + request.timeout_ms;
    bool bad = start_child(box, &request, stdin_fd, &job->child);
    job->out = job->err = (struct stream){.head = half, .tail = half};
    job->out.fd = job->child.out_fd;
    job->err.fd = job->child.err_fd;
    if (bad) {
        refuse(frame->id, errno == EAGAIN ? "sandbox: process limit reached\n" : "sandbox: cannot start a process\n");
        release(job);
    }
    if (stdin_fd >= 0) close(stdin_fd);
}

static void pong(uint32_t id) {
    uint8_t number[4];
    struct census census;
    take_census(box, &census, UINT64_MAX);
    put_u32(number, census.processes);
    send_frame(id, F_PONG, number, sizeof number);
}

/* What connects to it in here is accepted by the owner, out there: the one way out of a network without interfaces. */
static void pass_listener(const struct frame *frame) {
    uint32_t port = frame->len == 4 ? (uint32_t)frame->body[0] | (uint32_t)frame->body[1] << 8 : 0;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int yes = 1, fd = port ? socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0) : -1;
    bool bad = fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    bad = bad || bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 64);
    if (bad) refuse(frame->id, strerror(errno));
    else send_descriptor(frame->id, F_PASSED, fd);
    if (fd >= 0) close(fd);
}

static void handle(const struct frame *frame) {
    switch (frame->type) {
    case F_DATA: return add_data(frame);
    case F_EXEC: return start_job(frame);
    case F_KILL:
        for EACH_JOB(job)
            if (active(job) && job->id == frame->id) mark_killed(job, NONZERO);
        return;
    case F_PING: return pong(frame->id);
    case F_SNAPSHOT: return send_descriptor(frame->id, F_PASSED, box->upper_fd);
    case F_LISTEN: return pass_listener(frame);
    case F_ACK: return forget_kept(frame->id);
    default: end("unknown request");
    }
}

/* The owner asks again for what it has no answer to: half an upload is worthless, and a file is read from its start. */
static void forget_halves(void) {
    for EACH_JOB(job) {
        if (job->state == UPLOADING) {
            close(job->stdin_fd);
            memset(job, 0, sizeof *job);
        } else if (active(job) && job->kind == EXEC_READ) {
            mark_killed(job, NONZERO);
            job->state = REPORTED;
        }
    }
}

/* The launcher is gone, or wrote that we are in the memory cgroup now: commands that started before are not. */
static void launcher_says(void) {
    char number[16];
    if (read(box->alive_fd, number, 1) <= 0) _exit(0);
    rewinddir(box->proc);
    for (pid_t pid; (pid = next_process(box));) {
        int len = snprintf(number, sizeof number, "%d", (int)pid);
        (void)!write(box->join_fd, number, (size_t)len);
    }
}

/* ---- loop ---- */
/* Milliseconds until something has to be looked at without an event. */
static int next_timeout(int64_t watch_at, int64_t lease_end) {
    int64_t now = now_ms(), at = stream_retry_ms() < lease_end ? stream_retry_ms() : lease_end;
    for EACH_JOB(job) {
        int64_t due = job->killed_ms ? now + KILL_RETRY_MS : job->state == RUNNING ? job->deadline_ms : job->drain_ms;
        if ((active(job) || job->killed_ms) && due < at) at = due;
    }
    if (watch_at < at && others_alive()) at = watch_at;
    return at <= now ? 0 : at - now > 60000 ? 60000 : (int)(at - now);
}

static size_t streams_of(const struct job *job, struct pollfd *fds) {
    size_t n = 0;
    if (job->state < RUNNING) return 0;
    if (job->out.fd >= 0 && !must_wait(job)) fds[n++] = (struct pollfd){.fd = job->out.fd, .events = POLLIN};
    if (job->err.fd >= 0) fds[n++] = (struct pollfd){.fd = job->err.fd, .events = POLLIN};
    return n;
}

void supervise(struct sandbox *self) {
    static struct pollfd fds[3 + 2 * MAX_JOBS];
    struct signalfd_siginfo info;
    uint8_t real_root[4];
    unsigned losses = 0;
    sigset_t set;
    box = self;
    stream_init(box->container);
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    if (box->container) sigaddset(&set, SIGTERM); /* from the engine: commands may not signal another user's process */
    int deaths = sigprocmask(SIG_BLOCK, &set, NULL) ? -1 : signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (deaths < 0) fail("signalfd");
    int64_t lease_end = now_ms() + (int64_t)box->setup->numbers[N_LEASE_MS], watch_at = 0;
    put_u32(real_root, box->real_root);
    send_frame(0, F_READY, real_root, sizeof real_root);
    for (;;) {
        stream_flush();
        if (losses != stream_losses()) forget_halves(); /* before the owner asks again */
        losses = stream_losses();
        stream_reopen();
        size_t n = 3;
        fds[0] = (struct pollfd){.fd = stream_fd(), .events = stream_unsent() ? POLLIN | POLLOUT : POLLIN};
        fds[1] = (struct pollfd){.fd = deaths, .events = POLLIN};
        fds[2] = (struct pollfd){.fd = box->alive_fd, .events = POLLIN};
        for EACH_JOB(job) n += streams_of(job, fds + n);
        if (poll(fds, n, next_timeout(watch_at, lease_end)) < 0 && errno != EINTR) end("poll failed");
        while (fds[1].revents && read(deaths, &info, sizeof info) > 0)
            if (info.ssi_signo == SIGTERM) end("the container was stopped");
        if (fds[1].revents) reap();
        if (fds[2].revents) launcher_says();
        if (fds[0].revents && stream_fd() >= 0) stream_receive(handle);
        bool busy = false;
        for EACH_JOB(job) {
            advance(job);
            busy |= active(job);
        }
        int64_t next = now_ms() + (busy ? WATCH_MS : WATCH_IDLE_MS);
        if (now_ms() >= watch_at && others_alive()) watch_limits();
        if (now_ms() >= watch_at || next < watch_at) watch_at = next;
        if (now_ms() >= lease_end) end("lease ended");
    }
}
