/* Parsing and building of frames. Pure: no system calls beside memory, so that it can be fuzzed alone. */
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

static int grow(uint8_t **data, size_t *cap, size_t need) {
    if (need <= *cap) return 0;
    size_t size = *cap ? *cap : 16384;
    while (size < need) size *= 2;
    uint8_t *bigger = realloc(*data, size);
    if (!bigger) return -1;
    *data = bigger;
    *cap = size;
    return 0;
}

int inbox_room(struct inbox *in, uint8_t **at, size_t *room) {
    if (in->start == in->used) {
        in->start = in->used = 0;
        if (in->cap > (1u << 20)) { /* one large upload must not keep megabytes for the rest of a lease */
            free(in->data);
            in->data = NULL;
            in->cap = 0;
        }
    } else if (in->start > in->cap / 2) {
        memmove(in->data, in->data + in->start, in->used - in->start);
        in->used -= in->start;
        in->start = 0;
    }
    if (grow(&in->data, &in->cap, in->used + 8192)) return -1;
    *at = in->data + in->used;
    *room = in->cap - in->used;
    return 0;
}

void inbox_added(struct inbox *in, size_t count) { in->used += count; }

int inbox_next(struct inbox *in, struct frame *out) {
    size_t have = in->used - in->start;
    if (have < FRAME_HEADER) return 0;
    const uint8_t *head = in->data + in->start;
    out->len = load_u32(head);
    out->id = load_u32(head + 4);
    out->type = load_u32(head + 8);
    if (out->len > FRAME_MAX) return -1;
    if (have - FRAME_HEADER < out->len) return 0;
    out->body = head + FRAME_HEADER;
    in->start += FRAME_HEADER + out->len;
    return 1;
}

int outbox_bytes(struct outbox *out, const void *bytes, size_t len) {
    if (out->start == out->used) out->start = out->used = 0;
    if (grow(&out->data, &out->cap, out->used + len)) return -1;
    if (len) memcpy(out->data + out->used, bytes, len);
    out->used += len;
    return 0;
}

int outbox_frame(struct outbox *out, uint32_t id, uint32_t type, uint32_t len) {
    uint8_t head[FRAME_HEADER];
    put_u32(head, len);
    put_u32(head + 4, id);
    put_u32(head + 8, type);
    return outbox_bytes(out, head, sizeof head);
}

static const uint8_t *take(struct cursor *cur, size_t len) {
    if (cur->bad || (size_t)(cur->end - cur->at) < len) {
        cur->bad = true;
        return NULL;
    }
    const uint8_t *at = cur->at;
    cur->at += len;
    return at;
}

uint32_t take_u32(struct cursor *cur) {
    const uint8_t *at = take(cur, 4);
    return at ? load_u32(at) : 0;
}

uint64_t take_u64(struct cursor *cur) {
    uint64_t low = take_u32(cur);
    return low | (uint64_t)take_u32(cur) << 32;
}

const uint8_t *take_bytes(struct cursor *cur, uint32_t *len) {
    *len = take_u32(cur);
    const uint8_t *at = take(cur, *len);
    if (!at) *len = 0;
    return at;
}

const char *take_text(struct cursor *cur) {
    uint32_t len;
    const uint8_t *at = take_bytes(cur, &len);
    if (!at) return NULL;
    if (len == 0 || memchr(at, 0, len) != at + len - 1) {
        cur->bad = true;
        return NULL;
    }
    return (const char *)at;
}

int parse_exec(const struct frame *frame, struct exec_request *out) {
    struct cursor cur = {frame->body, frame->body + frame->len, false};
    out->kind = take_u32(&cur);
    out->timeout_ms = take_u32(&cur);
    out->keep_bytes = take_u32(&cur);
    out->kill_bytes = take_u64(&cur);
    out->cwd = take_text(&cur);
    out->text = take_text(&cur);
    if (cur.bad || cur.at != cur.end || out->kind > EXEC_WRITE || out->keep_bytes > KEEP_MAX) return -1;
    out->text_len = (uint32_t)strlen(out->text);
    return 0;
}

static bool add_item(struct setup *out, uint32_t tag, struct cursor *cur) {
    if (out->num_items == MAX_ITEMS) return false;
    struct setup_item *item = &out->items[out->num_items++];
    item->tag = tag;
    item->a = take_text(cur);
    item->len = 0;
    item->b = NULL;
    if (tag == T_FILE) item->b = (const char *)take_bytes(cur, &item->len);
    if (tag == T_BIND || tag == T_LINK) item->b = take_text(cur);
    if (tag == T_WORKDIR) out->workdir = item->a;
    return true;
}

static bool parse_tag(struct setup *out, uint32_t tag, struct cursor *cur) {
    switch (tag) {
    case T_BIND: case T_LINK: case T_FILE: case T_WORKDIR:
        return add_item(out, tag, cur);
    case T_LAYER:
        if (out->num_layers == MAX_LAYERS) return false;
        out->layers[out->num_layers++] = take_text(cur);
        return true;
    case T_ENV:
        if (out->num_env == MAX_ENV) return false;
        out->env[out->num_env++] = (char *)(uintptr_t)take_text(cur);
        return true;
    case T_NUMBER: {
        uint32_t index = take_u32(cur);
        uint64_t value = take_u64(cur);
        if (index >= N_NUMBERS) return false;
        out->numbers[index] = value;
        return true;
    }
    case T_CGROUP:
        out->cgroup = take_text(cur);
        return true;
    case T_SHELL:
        out->shell = take_text(cur);
        return true;
    default:
        return false;
    }
}

int parse_setup(const struct frame *frame, struct setup *out) {
    memset(out, 0, sizeof *out);
    if (frame->type != F_SETUP) return -1;
    struct cursor cur = {frame->body, frame->body + frame->len, false};
    while (!cur.bad && cur.at != cur.end)
        if (!parse_tag(out, take_u32(&cur), &cur)) return -1;
    return cur.bad || !out->workdir || !out->shell ? -1 : 0;
}
