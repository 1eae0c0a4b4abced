// Prefix trees over token ids, and the packing of pieces into rows. Meaning and Python twin: swe_rl/ops/trie.py.
//
// Plain C ABI, no torch headers. Callers hold no lock: ctypes lets go of Python's before it calls.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <unordered_map>
#include <vector>

namespace {

constexpr size_t MANY_CHILDREN = 8;  // from here on a child is found by hash, not by looking at each

// Tokens [begin, end) of `sample`, which is one of those that run through it; depth and position are the same thing.
struct Edge {
    int64_t sample, begin, end, parent, slot;  // slot: place among the children of the parent
    std::vector<int64_t> children;
    std::vector<int64_t> terminals;  // samples that end where the edge ends, in the order in which they came
};

struct Key {
    int64_t edge, token;
    bool operator==(const Key& other) const { return edge == other.edge && token == other.token; }
};

struct KeyHash {
    size_t operator()(const Key& key) const {
        uint64_t x = uint64_t(key.edge) * 0x9E3779B97F4A7C15ull ^ uint64_t(key.token);
        x = (x ^ x >> 31) * 0xBF58476D1CE4E5B9ull;
        return size_t(x ^ x >> 29);
    }
};

class Trie {
   public:
    Trie(const int64_t* ids, const int64_t* offsets, int64_t count) : ids_(ids), offsets_(offsets) {
        edges_.push_back({0, 0, 0, -1, -1, {}, {}});
        for (int64_t sample = 0; sample < count; sample++) insert(sample);
    }

    // Samples in depth-first order, and how many tokens each shares with the one before it.
    void walk(int64_t* order, int64_t* shared) const {
        std::vector<int64_t> stack{0};
        int64_t low = 0, place = 0;  // low: depth of the lowest edge end crossed since the last sample
        while (!stack.empty()) {
            const Edge& edge = edges_[stack.back()];
            stack.pop_back();
            if (edge.parent >= 0) low = std::min(low, edges_[edge.parent].end);
            for (int64_t sample : edge.terminals) {
                order[place] = sample, shared[place++] = low;
                low = edge.end;
            }
            stack.insert(stack.end(), edge.children.rbegin(), edge.children.rend());
        }
    }

   private:
    const int64_t *ids_, *offsets_;
    std::vector<Edge> edges_;
    std::unordered_map<Key, int64_t, KeyHash> slots_;  // of edges with many children

    int64_t token(int64_t sample, int64_t position) const { return ids_[offsets_[sample] + position]; }
    int64_t first_token(int64_t edge) const { return token(edges_[edge].sample, edges_[edge].begin); }

    int64_t find(int64_t parent, int64_t wanted) const {
        const auto& children = edges_[parent].children;
        if (children.size() >= MANY_CHILDREN) {
            const auto found = slots_.find({parent, wanted});
            return found == slots_.end() ? -1 : children[found->second];
        }
        for (int64_t child : children)
            if (first_token(child) == wanted) return child;
        return -1;
    }

    void append(int64_t parent, int64_t sample, int64_t begin, int64_t end) {
        auto& children = edges_[parent].children;
        const int64_t index = int64_t(edges_.size()), slot = int64_t(children.size());
        children.push_back(index);
        edges_.push_back({sample, begin, end, parent, slot, {}, {sample}});
        const auto& now = edges_[parent].children;
        if (now.size() == MANY_CHILDREN)
            for (size_t k = 0; k < now.size(); k++) slots_[{parent, first_token(now[k])}] = int64_t(k);
        else if (now.size() > MANY_CHILDREN)
            slots_[{parent, token(sample, begin)}] = slot;
    }

    // The upper part of an edge becomes an edge of its own; the lower part keeps index, children and terminals.
    int64_t split(int64_t lower, int64_t at) {
        const int64_t upper = int64_t(edges_.size());
        const Edge copy{edges_[lower].sample, edges_[lower].begin, at, edges_[lower].parent, edges_[lower].slot,
                        {lower}, {}};
        edges_.push_back(copy);
        edges_[copy.parent].children[copy.slot] = upper;
        edges_[lower].begin = at, edges_[lower].parent = upper, edges_[lower].slot = 0;
        return upper;
    }

    void insert(int64_t sample) {
        const int64_t length = offsets_[sample + 1] - offsets_[sample];
        const int64_t* mine = ids_ + offsets_[sample];
        int64_t edge = 0, position = 0;
        while (position < length) {
            const int64_t child = find(edge, mine[position]);
            if (child < 0) return append(edge, sample, position, length);
            const int64_t* its = ids_ + offsets_[edges_[child].sample];
            const int64_t stop = std::min(length, edges_[child].end);
            position = std::mismatch(mine + position, mine + stop, its + position).first - mine;
            edge = position < edges_[child].end ? split(child, position) : child;
        }
        edges_[edge].terminals.push_back(sample);
    }
};

// Rows base + depth for depths [from, to): what one sample added to the path that is open.
struct Run {
    int64_t from, to, base;
};

// Subtrees below `depth` end at row `total`.
void close_below(std::vector<Run>& open, int64_t depth, int64_t total, int32_t* kv_end) {
    while (!open.empty() && open.back().to > depth) {
        Run& run = open.back();
        const int64_t from = std::max(run.from, depth);
        std::fill(kv_end + run.base + from, kv_end + run.base + run.to, int32_t(total));
        if (from > run.from) {
            run.to = from;
            return;
        }
        open.pop_back();
    }
}

}  // namespace

extern "C" {

// ids of all samples behind each other, sample s at [offsets[s], offsets[s + 1]). Writes order [count], shared [count].
void swe_rl_trie_order(const int64_t* ids, const int64_t* offsets, int64_t count, int64_t* order, int64_t* shared) {
    Trie(ids, offsets, count).walk(order, shared);
}

// The samples order[0..count) as rows of one batch. Writes input_ids, position_ids and kv_end of each row, and
// row_of: the row of every token of every sample, in the order of `order`. Returns the number of rows.
int64_t swe_rl_trie_rows(const int64_t* ids, const int64_t* offsets, const int64_t* order, const int64_t* shared,
                         int64_t count, int64_t* input_ids, int64_t* position_ids, int32_t* kv_end, int64_t* row_of) {
    std::vector<Run> open;
    int64_t total = 0;
    const int64_t* before = row_of;
    for (int64_t k = 0; k < count; k++) {
        const int64_t* mine = ids + offsets[order[k]];
        const int64_t length = offsets[order[k] + 1] - offsets[order[k]], kept = shared[k];
        close_below(open, kept, total, kv_end);
        std::memmove(row_of, before, size_t(kept) * sizeof *row_of);
        std::iota(row_of + kept, row_of + length, total);
        std::copy(mine + kept, mine + length, input_ids + total);
        std::iota(position_ids + total, position_ids + total + length - kept, kept);
        if (kept < length) open.push_back({kept, length, total - kept});
        total += length - kept;
        before = row_of, row_of += length;
    }
    close_below(open, 0, total, kv_end);
    return total;
}

// First-fit-decreasing: writes bins [count], the row of each piece. Returns the number of rows.
int64_t swe_rl_first_fit(const int64_t* lengths, int64_t count, int64_t budget, int64_t* bins) {
    std::vector<int64_t> by_length(static_cast<size_t>(count));
    std::iota(by_length.begin(), by_length.end(), int64_t(0));
    std::stable_sort(by_length.begin(), by_length.end(), [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
    int64_t leaves = 1, used = 0;
    while (leaves < count) leaves *= 2;
    std::vector<int64_t> room(static_cast<size_t>(2 * leaves), budget);  // a tree of maxima; bins are its leaves
    for (int64_t piece : by_length) {
        int64_t node = 1;
        if (lengths[piece] > budget)
            node = leaves + used;
        else
            while (node < leaves) node = 2 * node + (room[2 * node] < lengths[piece]);
        bins[piece] = node - leaves;
        used = std::max(used, node - leaves + 1);
        room[node] = lengths[piece] > budget ? -1 : room[node] - lengths[piece];
        for (node /= 2; node > 0; node /= 2) room[node] = std::max(room[2 * node], room[2 * node + 1]);
    }
    return used;
}
}
