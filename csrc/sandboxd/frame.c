/* Parsing and building of frames. Pure: nothing of the system but memory, so that it can be fuzzed alone. */
#include "frame.h"

#include <stdlib.h>
#include <string.h>

static uint32_t load_u32(const uint8_t *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

void put_u32(uint8_t *at, uint32_t value) {
    for (int i = 0; i < 4; i++) at[i] = (uint8_t)(value >> (8 * i));
}
void put_u64(uint8_t *at, uint64_t value) {
    put_u32(at, (uint32_t)value);
    put_u32(at + 4, (uint32_t)(value >> 32));
}

static int grow(struct buffer *b, size_t need) {
    if (need <= b->cap) return 0;
    size_t size = b->cap ? b->cap : 16384;
    while (size < need) size *= 2;
    uint8_t *bigger = realloc(b->data, size);
    if (!bigger) return -1;
    b->data = bigger;
    b->cap = size;
    return 0;
}

static void compact(struct buffer *b) {
    if (b->start == b->used && b->cap > (1u << 20)) { /* one large upload must not keep megabytes for a whole lease */
        free(b->data);
        memset(b, 0, sizeof *b);
    } else if (b->start == b->used || b->start > b->cap / 2) {
        if (b->start < b->used) memmove(b->data, b->data + b->start, b->used - b->start);
        b->used -= b->start;
        b->start = 0;
    }
}

int inbox_room(struct buffer *in, uint8_t **at, size_t *room) {
    compact(in);
    if (grow(in, in->used + 8192)) return -1;
    *at = in->data + in->used;
    *room = in->cap - in->used;
    return 0;
}

void parse_header(const uint8_t *head, struct frame *out) {
    *out = (struct frame){load_u32(head), load_u32(head + 4), load_u32(head + 8), NULL};
}

int inbox_next(struct buffer *in, struct frame *out) {
    size_t have = in->used - in->start;
    if (have < FRAME_HEADER) return 0;
    parse_header(in->data + in->start, out);
    if (out->len > FRAME_MAX) return -1;
    if (have - FRAME_HEADER < out->len) return 0;
    out->body = in->data + in->start + FRAME_HEADER;
    in->start += FRAME_HEADER + out->len;
    return 1;
}

int outbox_add(struct buffer *out, const void *bytes, size_t len) {
    compact(out);
    if (grow(out, out->used + len)) return -1;
    if (len) memcpy(out->data + out->used, bytes, len);
    out->used += len;
    return 0;
}

int outbox_frame(struct buffer *out, uint32_t id, uint32_t type, uint32_t len) {
    uint8_t head[FRAME_HEADER];
    put_u32(head, len);
    put_u32(head + 4, id);
    put_u32(head + 8, type);
    return outbox_add(out, head, sizeof head);
}

struct cursor {
    const uint8_t *at, *end;
    bool bad; /* something was read past the end; values since then are 0 */
};

static const uint8_t *take(struct cursor *cur, size_t len) {
    if (cur->bad || (size_t)(cur->end - cur->at) < len) {
        cur->bad = true;
        return NULL;
    }
    cur->at += len;
    return cur->at - len;
}
static uint32_t take_u32(struct cursor *cur) {
    const uint8_t *at = take(cur, 4);
    return at ? load_u32(at) : 0;
}
static uint64_t take_u64(struct cursor *cur) {
    uint64_t low = take_u32(cur);
    return low | (uint64_t)take_u32(cur) << 32;
}

/* u32 length, that many bytes, a NUL that is not counted. */
static const char *take_bytes(struct cursor *cur, uint32_t *len) {
    *len = take_u32(cur);
    const uint8_t *at = take(cur, (size_t)*len + 1);
    if (at && at[*len] == 0) return (const char *)at;
    cur->bad = true;
    return NULL;
}

static const char *take_text(struct cursor *cur) {
    uint32_t len;
    const char *at = take_bytes(cur, &len);
    if (at && memchr(at, 0, len)) cur->bad = true;
    return at;
}

int parse_exec(const struct frame *frame, struct exec_request *out) {
    struct cursor cur = {frame->body, frame->body + frame->len, false};
    out->kind = take_u32(&cur);
    out->has_data = take_u32(&cur);
    out->timeout_ms = take_u32(&cur);
    out->keep_bytes = take_u32(&cur);
    out->kill_bytes = take_u64(&cur);
    out->cwd = take_text(&cur);
    out->text = take_text(&cur);
    return cur.bad || cur.at != cur.end || out->kind > EXEC_WRITE || out->keep_bytes > KEEP_MAX ? -1 : 0;
}

static bool note_item(struct setup *out, const struct setup_item *item) {
    switch (item->op) {
    case OP_BIND: case OP_DEVICE: case OP_LINK: case OP_FILE: case OP_EMPTY: return true;
    case OP_WORKDIR: return (out->workdir = item->a);
    case OP_SHELL: return (out->shell = item->a);
    case OP_IMAGE: return (out->image_layers = item->b) && (out->image = item->a);
    case OP_CPU: return (out->cpu_limit = item->b) && (out->cpu_group = item->a);
    case OP_USER:
        out->uid = (uint32_t)strtoul(item->a, NULL, 10);
        out->gid = (uint32_t)strtoul(item->b, NULL, 10);
        return true;
    case OP_CGROUP: return (out->cgroup_limit = item->b) && (out->cgroup = item->a);
    case OP_LAYER: return out->num_layers < MAX_LAYERS && (out->layers[out->num_layers++] = item->a);
    case OP_ENV: return out->num_env < MAX_ENV && (out->env[out->num_env++] = (char *)(uintptr_t)item->a);
    default: return false;
    }
}

int parse_setup(const struct frame *frame, struct setup *out) {
    struct cursor cur = {frame->body, frame->body + frame->len, frame->type != F_SETUP};
    memset(out, 0, sizeof *out);
    out->uid = out->gid = 1000;
    for (int i = 0; i < N_NUMBERS; i++) out->numbers[i] = take_u64(&cur);
    while (!cur.bad && cur.at != cur.end) {
        if (out->num_items == MAX_ITEMS) return -1;
        struct setup_item *item = &out->items[out->num_items++];
        item->op = take_u32(&cur);
        item->a = take_text(&cur);
        item->b = take_bytes(&cur, &item->len);
        if (cur.bad || !note_item(out, item)) return -1;
    }
    return cur.bad || !out->workdir || !out->shell ? -1 : 0;
}
