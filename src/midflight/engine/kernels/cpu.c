/* Kernels of a decode step, except its matrix products, for one head geometry and one element type.
 *
 * Compiled on the user's machine by cpu.py with
 *   E  elements of a head        G  query heads per key/value head        K  key/value heads
 *   BF16 defined: elements are bfloat16, kept as 16-bit integers; all arithmetic is float32 either way.
 *
 * The cache is paged. A page holds PAGE tokens: keys [K][E][PAGE], values [K][PAGE][E]. In this layout one vector
 * register holds PAGE scores, and no sum runs across a register.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define PAGE 16
#define H (G * K)
/* Tokens per block of the online softmax: bounds the scores that a thread keeps on its stack. */
#define BLOCK (16 * PAGE)
/* Smallest number of elements for which a second thread pays. */
#define PARALLEL_FROM 8192

#ifdef BF16
typedef uint16_t element;
static inline float load(element x) {
    union { uint32_t bits; float value; } u = {(uint32_t)x << 16};
    return u.value;
}
static inline element rounded(float x) {
    union { float value; uint32_t bits; } u = {x};
    return (element)((u.bits + 0x7FFF + ((u.bits >> 16) & 1)) >> 16);
}
#else
typedef float element;
static inline float load(element x) { return x; }
static inline element rounded(float x) { return x; }
#endif

/* exp(x) for x <= 0, accurate to about 2 units in the last place, in a form that vectorizes. Returns 0 below -87, where
 * normal float32 numbers end. Cody-Waite reduction and the polynomial of Cephes' expf. */
static inline float exp_of_nonpositive(float x) {
    float bounded = x < -87.0f ? -87.0f : x;
    float n = __builtin_rintf(bounded * 1.44269504f);
    float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t bits; float value; } scale = {((int32_t)n + 127) << 23};
    return x < -87.0f ? 0.0f : p * scale.value;
}

/* out [D] = x [D] / rms(x) * weight, as Llama defines it; out may be x. */
static inline void normalize(const element *x, const element *weight, float eps, element *out, long D) {
    float squares = 0;
    for (long d = 0; d < D; d++) squares += load(x[d]) * load(x[d]);
    float scale = 1.0f / sqrtf(squares / D + eps);
    for (long d = 0; d < D; d++) out[d] = rounded(load(rounded(load(x[d]) * scale)) * load(weight[d]));
}

/* x, out [N, D]. */
void rms_norm(const element *restrict x, const element *restrict weight, float eps, element *restrict out, long N,
              long D, int threads) {
#pragma omp parallel for num_threads(threads) if (N * D >= PARALLEL_FROM)
    for (long n = 0; n < N; n++) normalize(x + n * D, weight, eps, out + n * D, D);
}

/* out [N, I] = silu(gate) * up, gate_up [N, 2 I]. */
void silu_mul(const element *restrict gate_up, element *restrict out, long N, long I, int threads) {
#pragma omp parallel for num_threads(threads) if (N * I >= PARALLEL_FROM)
    for (long n = 0; n < N; n++) {
        const element *gate = gate_up + n * 2 * I, *up = gate + I;
        for (long i = 0; i < I; i++) {
            float x = load(gate[i]), decayed = exp_of_nonpositive(-fabsf(x));
            out[n * I + i] = rounded(x * (x >= 0 ? 1.0f : decayed) / (1.0f + decayed) * load(up[i]));
        }
    }
}

static inline void rotate_head(element *head, const float *cos, const float *sin) {
    for (int e = 0; e < E / 2; e++) {
        float a = load(head[e]), b = load(head[e + E / 2]);
        head[e] = rounded(a * cos[e] - b * sin[e]);
        head[e + E / 2] = rounded(b * cos[e] + a * sin[e]);
    }
}

static inline void store_token(const element *key, const element *value, element *keys, element *values, long entry) {
    element *key_page = keys + entry / PAGE * K * E * PAGE + entry % PAGE;
    element *value_page = values + entry / PAGE * K * E * PAGE + entry % PAGE * E;
    for (int k = 0; k < K; k++) {
        for (int e = 0; e < E; e++) key_page[(k * E + e) * PAGE] = key[k * E + e];
        memcpy(value_page + k * E * PAGE, value + k * E, E * sizeof(element));
    }
}

/* Rotates the queries and keys of qkv [N, (H + 2 K) * E] in place and stores keys and values in the cache at
 * slot_mapping [N]. cos, sin [positions, E / 2]. query_norm and key_norm, [E] or NULL, are applied to each head first.
 */
void rope_and_store(element *restrict qkv, const float *restrict cos, const float *restrict sin,
                    const element *query_norm, const element *key_norm, float eps, const int64_t *restrict positions,
                    const int64_t *restrict slot_mapping, element *restrict keys, element *restrict values, long N,
                    int threads) {
#pragma omp parallel for num_threads(threads) if (N * (H + 2 * K) * E >= PARALLEL_FROM)
    for (long n = 0; n < N; n++) {
        element *row = qkv + n * (H + 2 * K) * E;
        const float *c = cos + positions[n] * (E / 2), *s = sin + positions[n] * (E / 2);
        for (int h = 0; h < H + K; h++) {
            if (query_norm) normalize(row + h * E, h < H ? query_norm : key_norm, eps, row + h * E, E);
            rotate_head(row + h * E, c, s);
        }
        store_token(row + H * E, row + (H + K) * E, keys, values, slot_mapping[n]);
    }
}

/* Stores key and value [N, K * E] in the cache at slot_mapping [N]. */
void store(const element *restrict key, const element *restrict value, const int64_t *restrict slot_mapping,
           element *restrict keys, element *restrict values, long N, int threads) {
#pragma omp parallel for num_threads(threads) if (N * K * E >= PARALLEL_FROM)
    for (long n = 0; n < N; n++) store_token(key + n * K * E, value + n * K * E, keys, values, slot_mapping[n]);
}

/* Returns the values of a page. If entries outside first .. stop - 1 exist, returns a copy with zeros in their place:
 * they may hold NaN, which a probability of 0 does not mask. With a copy, all pages run through the same loop and round
 * alike. */
static inline const element *visible_values(const element *page, int first, int stop, element *copy) {
    if (first <= 0 && stop >= PAGE) return page;
    first = first < 0 ? 0 : first;
    stop = stop > PAGE ? PAGE : stop;
    memset(copy, 0, PAGE * E * sizeof(element));
    memcpy(copy + first * E, page + first * E, (stop - first) * E * sizeof(element));
    return copy;
}

/* Attention of one query token to positions first .. last of its sequence. */
static void attend_one(const element *restrict query, const element *restrict keys, const element *restrict values,
                       const int32_t *restrict table, long first, long last, int k, float scale, float softcap,
                       element *restrict out) {
    element visible[PAGE * E];
    float q[G][E], sums[G][E], scores[G][BLOCK], tops[G], totals[G];
    for (int g = 0; g < G; g++) {
        tops[g] = -INFINITY;
        totals[g] = 0;
        for (int e = 0; e < E; e++) {
            q[g][e] = load(query[g * E + e]) * scale;
            sums[g][e] = 0;
        }
    }
    for (long start = first / PAGE * PAGE; start <= last; start += BLOCK) {
        int length = last - start + 1 < BLOCK ? last - start + 1 : BLOCK;
        for (int p = 0; p * PAGE < length; p++) {
            const element *page = keys + ((long)table[start / PAGE + p] * K + k) * E * PAGE;
            float partial[G][PAGE] = {{0}};
            for (int e = 0; e < E; e++)
                for (int g = 0; g < G; g++)
                    for (int s = 0; s < PAGE; s++) partial[g][s] += q[g][e] * load(page[e * PAGE + s]);
            for (int g = 0; g < G; g++)
                for (int s = 0; s < PAGE; s++) scores[g][p * PAGE + s] = partial[g][s];
        }
        int hidden = start < first ? first - start : 0, padded = (length + PAGE - 1) / PAGE * PAGE;
        for (int g = 0; g < G; g++) {
            if (softcap > 0)
                for (int t = 0; t < length; t++) scores[g][t] = softcap * tanhf(scores[g][t] / softcap);
            float top = tops[g];
            for (int t = hidden; t < length; t++) top = scores[g][t] > top ? scores[g][t] : top;
            float decay = exp_of_nonpositive(tops[g] - top), total = 0;
            for (int t = 0; t < length; t++) {
                scores[g][t] = t < hidden ? 0 : exp_of_nonpositive(scores[g][t] - top);
                total += scores[g][t];
            }
            for (int t = length; t < padded; t++) scores[g][t] = 0;
            for (int e = 0; e < E; e++) sums[g][e] *= decay;
            totals[g] = totals[g] * decay + total;
            tops[g] = top;
        }
        for (int p = 0; p * PAGE < length; p++) {
            const element *page = values + ((long)table[start / PAGE + p] * K + k) * E * PAGE;
            page = visible_values(page, hidden - p * PAGE, length - p * PAGE, visible);
            for (int s = 0; s < PAGE; s++)
                for (int g = 0; g < G; g++)
                    for (int e = 0; e < E; e++) sums[g][e] += scores[g][p * PAGE + s] * load(page[s * E + e]);
        }
    }
    for (int g = 0; g < G; g++)
        for (int e = 0; e < E; e++) out[g * E + e] = rounded(sums[g][e] / totals[g]);
}

/* Attention of N query tokens, out [N, H * E]. Token n, at query + n * query_stride, attends to positions
 * 0 .. positions[n] of the sequence in slots[n], whose pages are tables[slots[n]]. With window > 0 it attends only to
 * the last `window` positions. */
void attend(const element *restrict query, long query_stride, const element *restrict keys,
            const element *restrict values, const int32_t *restrict tables, long table_width,
            const int64_t *restrict slots, const int64_t *restrict positions, float scale, float softcap, long window,
            element *restrict out, long N, int threads) {
#pragma omp parallel for collapse(2) schedule(dynamic, 4) num_threads(threads) if (N * H * E >= 512)
    for (long n = 0; n < N; n++)
        for (int k = 0; k < K; k++) {
            long last = positions[n], first = window > 0 && last >= window ? last - window + 1 : 0;
            attend_one(query + n * query_stride + k * G * E, keys, values, tables + slots[n] * table_width, first, last,
                       k, scale, softcap, out + (n * K + k) * G * E);
        }
}

/* Samples one token per row of logits [N, V]: the smallest index whose cumulative probability exceeds uniforms[n]. If
 * temperatures[n] is 0, takes the most likely token. Also returns the log-probability of the token at that temperature
 * (at temperature 1 if it is 0). */
void sample(const float *restrict logits, const float *restrict temperatures, const float *restrict uniforms,
            int64_t *restrict token_ids, float *restrict logprobs, long N, long V, int threads) {
    enum { SPAN = 512 };
#pragma omp parallel for num_threads(threads) if (N * V >= PARALLEL_FROM)
    for (long n = 0; n < N; n++) {
        const float *row = logits + n * V;
        float inverse = temperatures[n] > 0 ? 1.0f / temperatures[n] : 1.0f, top = -INFINITY;
        for (long v = 0; v < V; v++) top = row[v] > top ? row[v] : top;
        double total = 0;
        double spans[(V + SPAN - 1) / SPAN];
        for (long start = 0; start < V; start += SPAN) {
            long end = start + SPAN < V ? start + SPAN : V;
            float sum = 0;
            for (long v = start; v < end; v++) sum += exp_of_nonpositive((row[v] - top) * inverse);
            spans[start / SPAN] = sum;
            total += sum;
        }
        long chosen = V;
        if (temperatures[n] > 0) {
            double target = uniforms[n] * total, below = 0;
            long span = 0, last_span = (V - 1) / SPAN;
            while (span < last_span && below + spans[span] <= target) below += spans[span++];
            long end = (span + 1) * SPAN < V ? (span + 1) * SPAN : V;
            for (long v = span * SPAN; v < end; v++) {
                float p = exp_of_nonpositive((row[v] - top) * inverse);
                if (row[v] > -INFINITY) chosen = v; /* rounding may leave the target just past the last token */
                if ((below += p) > target && row[v] > -INFINITY) break;
            }
        }
        if (chosen == V)
            for (chosen = 0; row[chosen] < top; chosen++) {}
        token_ids[n] = chosen;
        logprobs[n] = (row[chosen] - top) * inverse - (float)log(total);
    }
}

/* Writes source [R, C], transposed, to columns 0 .. R - 1 of target [C, width]. source_type 0: float32, 1: bfloat16. */
void transpose(const void *restrict source, int source_type, element *restrict target, long width, long R, long C,
               int threads) {
    enum { TILE = 32 };
#pragma omp parallel for num_threads(threads) if (R * C >= PARALLEL_FROM)
    for (long column = 0; column < C; column += TILE)
        for (long row = 0; row < R; row += TILE) {
            long rows = R - row < TILE ? R - row : TILE, columns = C - column < TILE ? C - column : TILE;
            float tile[TILE][TILE];
            for (long r = 0; r < rows; r++) {
                long at = (row + r) * C + column;
                if (source_type == 0)
                    for (long c = 0; c < columns; c++) tile[r][c] = ((const float *)source)[at + c];
                else
                    for (long c = 0; c < columns; c++) {
                        union { uint32_t bits; float value; } u = {(uint32_t)((const uint16_t *)source)[at + c] << 16};
                        tile[r][c] = u.value;
                    }
            }
            for (long c = 0; c < columns; c++)
                for (long r = 0; r < rows; r++) target[(column + c) * width + row + r] = rounded(tile[r][c]);
        }
}
