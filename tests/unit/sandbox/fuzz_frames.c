/* Deterministic mutation fuzzing of the frame parser: valid frames are mutated, cut and fed in random pieces.
 * Built with address and undefined-behaviour sanitizers by test_frames.py. Usage: fuzz ITERATIONS SEED */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "frame.h"

static uint64_t state;

static uint32_t any(uint32_t below) { /* xorshift64* */
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return below ? (uint32_t)((state * 0x2545F4914F6CDD1Dull) >> 33) % below : 0;
}

static size_t put_bytes(uint8_t *at, const char *bytes, uint32_t len) {
    put_u32(at, len);
    memcpy(at + 4, bytes, len);
    at[4 + len] = 0;
    return 5 + len;
}

/* One valid frame; returns its size. */
static size_t valid_frame(uint8_t *at) {
    uint8_t *body = at + FRAME_HEADER, *end = body;
    uint32_t type = any(3) ? F_SETUP : F_EXEC;
    if (type == F_SETUP) {
        for (int i = 0; i < N_NUMBERS; i++, end += 8) put_u64(end, any(1 << 30));
        uint32_t items = any(12);
        for (uint32_t i = 0; i < items + 2; i++) {
            put_u32(end, i == 0 ? OP_WORKDIR : i == 1 ? OP_SHELL : 1 + any(OP_USER));
            end += 4;
            end += put_bytes(end, "/some/path", any(11));
            end += put_bytes(end, "content\0with nul", any(17));
        }
    } else {
        uint32_t words[] = {any(3), any(2), any(100000), any(65536), any(1u << 30), any(3)};
        for (int i = 0; i < 6; i++, end += 4) put_u32(end, words[i]);
        end += put_bytes(end, "/testbed", any(9));
        end += put_bytes(end, "echo hello; exit 3", any(19));
    }
    put_u32(at, (uint32_t)(end - body));
    put_u32(at + 4, any(1000));
    put_u32(at + 8, type);
    return (size_t)(end - at);
}

static void mutate(uint8_t *bytes, size_t len) {
    static const uint32_t edges[] = {0, 1, 11, 12, 0x7fffffff, 0x80000000, 0xfffffff3, 0xffffffff, FRAME_MAX, FRAME_MAX + 1};
    for (uint32_t rounds = any(4); rounds; rounds--) {
        uint32_t at = any((uint32_t)len), kind = any(3);
        if (kind == 0) bytes[at] ^= (uint8_t)(1u << any(8));
        if (kind == 1) bytes[at] = (uint8_t)any(256);
        if (kind == 2 && at + 4 <= len) put_u32(bytes + at, edges[any(sizeof edges / sizeof *edges)]);
    }
}

static unsigned long checksum; /* reads every byte that the parser promises, so that a bad promise is a report */

static void touch(const char *text) {
    if (text) checksum += strlen(text);
}

static void parse(const struct frame *frame) {
    static struct setup setup;
    struct exec_request request;
    for (uint32_t i = 0; i < frame->len; i++) checksum += frame->body[i];
    if (parse_exec(frame, &request) == 0) {
        touch(request.cwd);
        touch(request.text);
    }
    if (parse_setup(frame, &setup)) return;
    touch(setup.workdir);
    touch(setup.shell);
    touch(setup.cgroup);
    touch(setup.cgroup_limit);
    touch(setup.image);
    touch(setup.image_layers);
    for (size_t i = 0; i < setup.num_layers; i++) touch(setup.layers[i]);
    for (char **env = setup.env; *env; env++) touch(*env);
    for (size_t i = 0; i < setup.num_items; i++) {
        touch(setup.items[i].a);
        for (uint32_t k = 0; setup.items[i].b && k <= setup.items[i].len; k++) checksum += (uint8_t)setup.items[i].b[k];
    }
}

int main(int argc, char **argv) {
    unsigned long iterations = argc > 1 ? strtoul(argv[1], NULL, 10) : 1000, frames = 0, refused = 0;
    state = (argc > 2 ? strtoull(argv[2], NULL, 10) : 1) * 0x9E3779B97F4A7C15ull + 1;
    for (unsigned long i = 0; i < iterations; i++) {
        struct buffer inbox = {0};
        uint8_t stream[8192], *at;
        size_t len = 0, room, done = 0;
        for (uint32_t n = 1 + any(4); n; n--) {
            size_t one = valid_frame(stream + len);
            if (any(4)) mutate(stream + len, one);
            len += any(8) ? one : any((uint32_t)one);
        }
        int more = 0;
        while (more >= 0 && done < len) {
            struct frame frame;
            if (inbox_room(&inbox, &at, &room)) return 2;
            size_t piece = 1 + any(600);
            if (piece > len - done) piece = len - done;
            if (piece > room) piece = room;
            memcpy(at, stream + done, piece);
            inbox.used += piece;
            done += piece;
            while ((more = inbox_next(&inbox, &frame)) > 0) {
                parse(&frame);
                frames++;
            }
        }
        refused += more < 0;
        struct buffer outbox = {0};
        if (outbox_frame(&outbox, 1, F_RESULT, 3) || outbox_add(&outbox, "abc", 3) || outbox.used != FRAME_HEADER + 3) return 3;
        free(outbox.data);
        free(inbox.data);
    }
    printf("%lu frames, %lu streams refused, checksum %lu\n", frames, refused, checksum);
    return 0;
}
