/* Framed protocol between the owner and a sandbox, over one SOCK_STREAM socketpair, or over a connection that a
 * supervisor in a container opens, and opens again when it breaks.
 *
 * Every frame: u32 body length, u32 request id, u32 type, then the body. All integers are little-endian.
 * The reader trusts nothing: a bad length or a short body is an error, never a read past the end. */
#ifndef SWE_FRAME_H
#define SWE_FRAME_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#define FRAME_HEADER 12u
#define FRAME_MAX (8u << 20) /* body bytes; larger data travels in several F_DATA or F_CHUNK frames */
#define KEEP_MAX (3u << 20)  /* output bytes kept per stream, so that both fit one F_RESULT */
#define MAX_ITEMS 1024
#define MAX_LAYERS 64
#define MAX_ENV 512

enum frame_type { /* requests, then answers */
    F_SETUP = 1,  /* first frame, read by the launcher; may carry one descriptor: the upper directory to copy */
    F_EXEC,       /* see exec_request */
    F_DATA,       /* stdin or file content of the F_EXEC with the same id, sent before it */
    F_KILL,       /* kill that command's process tree; its F_RESULT follows */
    F_PING,
    F_SNAPSHOT,   /* asks for the upper directory; in a container for the work directory */
    F_ACK,        /* the F_RESULT with this id has arrived; in a container results are kept until then */
    F_LISTEN,     /* u32 port: asks for a socket that listens there on the loopback of the sandbox */
    F_READY = 32,
    F_FAILED,     /* u32 errno, text: the sandbox could not be made */
    F_RESULT,     /* see send_result */
    F_CHUNK,      /* a piece of a file that is being read */
    F_PONG,       /* u32 processes alive beside the supervisor */
    F_PASSED,     /* answer to F_SNAPSHOT and F_LISTEN, carries the descriptor */
    F_ENDED,      /* text: why the sandbox ends by itself */
    F_HELLO,      /* first frame of a connection from a container: nonce, boot id */
};

struct frame {
    uint32_t len, id, type;
    const uint8_t *body; /* valid until the next call on the inbox */
};
struct buffer {
    uint8_t *data;
    size_t start, used, cap; /* bytes [start, used) are waiting */
};

/* The functions that return int give -1 on a broken peer or when memory is short. */
int inbox_room(struct buffer *in, uint8_t **at, size_t *room); /* then add what was received to in->used */
int inbox_next(struct buffer *in, struct frame *out);          /* 1: a frame, 0: more bytes are needed */
int outbox_add(struct buffer *out, const void *bytes, size_t len);
int outbox_frame(struct buffer *out, uint32_t id, uint32_t type, uint32_t len); /* header; outbox_add the body */
void put_u32(uint8_t *at, uint32_t value);
void put_u64(uint8_t *at, uint64_t value);
void parse_header(const uint8_t *head, struct frame *out);
enum exec_kind { EXEC_SHELL, EXEC_READ, EXEC_WRITE };

struct exec_request {
    uint32_t kind, has_data, timeout_ms, keep_bytes;
    uint64_t kill_bytes;
    const char *cwd, *text; /* NUL-terminated; text is the command or the path */
};
int parse_exec(const struct frame *frame, struct exec_request *out);
enum setup_number { N_MEMORY, N_PIDS, N_DISK, N_LEASE_MS, N_OWNER, N_FLAGS, N_NUMBERS };
enum setup_flag { FLAG_NO_IDMAP = 1, FLAG_USERNS = 2 }; /* tests force the fallbacks with these */
enum setup_op {
    OP_BIND = 1, /* a: path inside, b: host path, read-only */
    OP_DEVICE,   /* the same for a device node */
    OP_LINK,     /* a: path, b: link text */
    OP_FILE,     /* a: path, b: content */
    OP_WORKDIR,  /* a: path; the overlay is mounted here */
    OP_LAYER,    /* a: host directory, uppermost first */
    OP_ENV,      /* a: NAME=value */
    OP_SHELL,    /* a: path inside */
    OP_CGROUP,   /* a: memory cgroup directory to create, b: file of its limit */
    OP_EMPTY,    /* a: path inside; an empty directory is mounted over what is there (in a container: by the engine) */
    OP_IMAGE,    /* a: host directory of the unpacked layers, b: their names in it, uppermost first, joined by ':' */
    OP_USER,     /* a, b: uid and gid of commands inside; 1000 and 1000 without it */
    OP_CPU,      /* a: cpu cgroup directory to create, or that of OP_CGROUP, b: "FILE VALUE" to write there */
};
struct setup_item {
    uint32_t op, len; /* len: bytes of b */
    const char *a, *b; /* both NUL-terminated */
};
struct setup {
    uint64_t numbers[N_NUMBERS];
    struct setup_item items[MAX_ITEMS];
    size_t num_items, num_layers, num_env;
    const char *layers[MAX_LAYERS], *workdir, *shell, *cgroup, *cgroup_limit, *cpu_group, *cpu_limit;
    const char *image, *image_layers; /* NULL: the root is made of the items */
    uint32_t uid, gid;
    char *env[MAX_ENV + 1];
};
int parse_setup(const struct frame *frame, struct setup *out); /* *out points into the body */
#endif
