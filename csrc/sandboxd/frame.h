/* Framed protocol between the owner and a sandbox, over one SOCK_STREAM socketpair.
 *
 * Every frame: u32 body length, u32 request id, u32 type, then the body. All integers are little-endian.
 * The reader trusts nothing: a bad length or a short body is an error, never a read past the end.
 */
#ifndef SWE_FRAME_H
#define SWE_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FRAME_HEADER 12u
#define FRAME_MAX (8u << 20)  /* body bytes; larger data travels in several F_DATA or F_CHUNK frames */
#define KEEP_MAX (3u << 20)   /* output bytes kept per stream, so that both fit one F_RESULT */

enum frame_type {
    F_SETUP = 1,    /* owner -> launcher, first frame; may carry one descriptor: the upper directory to copy */
    F_EXEC = 2,     /* start a command, a read or a write (see exec_request) */
    F_DATA = 3,     /* stdin or file content of the F_EXEC with the same id, sent before it */
    F_KILL = 4,     /* kill that command's process tree; its F_RESULT follows */
    F_PING = 5,
    F_SNAPSHOT = 6, /* asks for the upper directory */
    F_READY = 32,
    F_FAILED = 33,  /* u32 errno, text: the sandbox could not be made */
    F_RESULT = 34,
    F_CHUNK = 35,   /* a piece of a file that is being read */
    F_PONG = 36,    /* u32 processes alive beside the supervisor */
    F_UPPER = 37,   /* answer to F_SNAPSHOT, carries the descriptor */
    F_ENDED = 38,   /* text: why the sandbox ends by itself */
};

struct frame {
    uint32_t id, type, len;
    const uint8_t *body; /* valid until the next call on the inbox */
};

struct inbox {
    uint8_t *data;
    size_t start, used, cap;
};

/* Room for at least one read; returns -1 when memory is short. */
int inbox_room(struct inbox *in, uint8_t **at, size_t *room);
void inbox_added(struct inbox *in, size_t count);
/* 1: *out is a complete frame, 0: more bytes are needed, -1: the peer broke the protocol. */
int inbox_next(struct inbox *in, struct frame *out);

struct outbox {
    uint8_t *data;
    size_t start, used, cap;
};

/* Appends a header for `len` body bytes; the body follows by outbox_bytes. -1 when memory is short. */
int outbox_frame(struct outbox *out, uint32_t id, uint32_t type, uint32_t len);
int outbox_bytes(struct outbox *out, const void *bytes, size_t len);
void put_u32(uint8_t *at, uint32_t value);
void put_u64(uint8_t *at, uint64_t value);

struct cursor {
    const uint8_t *at, *end;
    bool bad; /* something was read past the end; values since then are 0 */
};

uint32_t take_u32(struct cursor *cur);
uint64_t take_u64(struct cursor *cur);
/* u32 length, bytes. */
const uint8_t *take_bytes(struct cursor *cur, uint32_t *len);
/* The same, and the bytes end in their only NUL; NULL (and bad) otherwise. */
const char *take_text(struct cursor *cur);

enum exec_kind { EXEC_SHELL = 0, EXEC_READ = 1, EXEC_WRITE = 2 };

struct exec_request {
    uint32_t kind, timeout_ms, keep_bytes;
    uint64_t kill_bytes;
    const char *cwd, *text; /* NUL-terminated; text is the command or the path */
    uint32_t text_len;
};

int parse_exec(const struct frame *frame, struct exec_request *out);

#define MAX_ITEMS 256
#define MAX_LAYERS 64
#define MAX_ENV 512

enum setup_tag {
    T_BIND = 1,     /* source, target: bound read-only */
    T_LINK = 2,     /* link text, path */
    T_FILE = 3,     /* path, content */
    T_WORKDIR = 4,  /* path: here the overlay is mounted */
    T_LAYER = 5,    /* host directory, uppermost first */
    T_ENV = 6,      /* NAME=value */
    T_NUMBER = 7,   /* u32 index into numbers, u64 value */
    T_CGROUP = 8,   /* memory cgroup directory to create */
    T_SHELL = 9,    /* path of the shell inside */
};

enum setup_number { N_MEMORY, N_PIDS, N_DISK, N_LEASE_MS, N_OWNER, N_FLAGS, N_NUMBERS };
enum setup_flags { FLAG_NO_IDMAP = 1, FLAG_USERNS = 2 }; /* tests force the fallbacks with these */

struct setup_item {
    uint32_t tag, len; /* len: bytes of b for T_FILE */
    const char *a, *b;
};

struct setup {
    struct setup_item items[MAX_ITEMS];
    const char *layers[MAX_LAYERS];
    char *env[MAX_ENV + 1];
    size_t num_items, num_layers, num_env;
    uint64_t numbers[N_NUMBERS];
    const char *workdir, *cgroup, *shell;
};

/* Fills *out with pointers into the body. -1: malformed or over a bound above. */
int parse_setup(const struct frame *frame, struct setup *out);

#endif
