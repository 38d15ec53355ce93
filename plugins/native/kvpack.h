/* kvpack: compressed-KV attention on NVIDIA GPUs, as a C library.
 *
 * One function per op does one step of one layer on a stream: attend over the stored rows and the new tokens, append the
 * new tokens, encode what leaves the window. The ops are those of the ONNX domain "kvpack"; plugins/<method>/reference.py
 * says what each means. Every pointer is a device pointer unless it is said otherwise. Nothing here synchronises with
 * the device, allocates, or keeps state: a step of one token (`length` 1) can be captured in a CUDA graph and replayed
 * with other lengths, since past_len, new_len, enc_src, enc_dst and select_len are read on the device.
 *
 * Functions return KVPACK_OK or an error code; `kvpack_last_error` tells the calling thread what was wrong.
 * All matrices are row-major and, but for q, k and v, contiguous. B batch, S new tokens, H KV heads, Hq query heads, D
 * head dimension.
 */
#ifndef KVPACK_H
#define KVPACK_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVPACK_ABI 2
#define KVPACK_API __attribute__((visibility("default")))

enum { KVPACK_OK = 0, KVPACK_UNSUPPORTED = 1, KVPACK_BAD_ARGUMENT = 2, KVPACK_WORKSPACE = 3, KVPACK_CUDA = 4 };
enum { KVPACK_FP16 = 0, KVPACK_BF16 = 1 };
enum { KVPACK_PLAIN = 0, KVPACK_TILES = 1 };
#define KVPACK_MAX_STAGES 64
#define KVPACK_MAX_SEGMENTS 8

/* What is fixed about one layer. */
typedef struct {
  int32_t num_heads, num_kv_heads, head_dim, rotary_dim; /* rotary_dim 0: no RoPE */
  int32_t sliding_window;                                /* tokens; 0: none */
  int32_t dtype;                                         /* of q, k, v, out and of all 16-bit states */
  float scale, softcap;                                  /* softcap 0: none */
} kvpack_layer;

/* What every step has. */
typedef struct {
  int32_t batch, length; /* B, S */
  int32_t live;          /* no sequence stores more tokens than this; 0: every prompt is fresh. Read when S > 1 only */
  int32_t encode;        /* E: rows to encode per sequence, 0 or a multiple of the block */
  const void *q, *k, *v; /* [B, S, Hq, D], [B, S, H, D] twice, before RoPE; 16-byte aligned */
  void *out;             /* [B, S, Hq, D]; tokens at or past new_len are 0 */
  int32_t q_row, kv_row; /* elements from a token to the next, in q, and in k and v: multiples of 8, so that the three
                            can lie side by side; 0: Hq * D, H * D */
  const int32_t *past_len, *new_len; /* [B] */
  const int32_t *enc_src, *enc_dst;  /* [B, E]; see plugins.geometry.Geometry.schedule */
  const float *cos, *sin;            /* [rope_rows, rotary_dim / 2] */
  int32_t rope_rows;
  void *workspace; /* of at least the bytes that kvpack_<op>_workspace says, 256-byte aligned */
  size_t workspace_bytes;
  void *stream; /* cudaStream_t */
} kvpack_step;

/* The exact part of a compressed cache; see plugins.geometry.Geometry. */
typedef struct {
  int32_t sinks, window, block;
} kvpack_geometry;

/* DenseAttention and, with `selected`, DenseObservedAttention. */
typedef struct {
  void *k, *v;  /* [B, H, rows, D]; k rotated. Position p is row p, the last row is the trash row; with a sliding window
                   of w, rows = w and position p is row p mod w */
  int32_t rows;
  kvpack_geometry geometry;  /* of the compressed layers, for the selection */
  const int32_t *select_len; /* [B]; NULL with `selected` NULL */
  int32_t select_width;      /* M */
  int32_t *selected;         /* [B, M]: the code rows with the largest softmax probability of any head, the lower of
                                equals, in ascending order; when S > 1 all code rows. NULL: not observed */
} kvpack_dense;

KVPACK_API size_t kvpack_dense_workspace(const kvpack_layer *, const kvpack_step *, const kvpack_dense *);
KVPACK_API int kvpack_dense_attention(const kvpack_layer *, const kvpack_step *, const kvpack_dense *);

/* VQKVAttention. Tables as in plugins.vqkv.reference.Quantiser, float32, T = H (tables == "head") or 1. */
typedef struct {
  kvpack_geometry geometry;
  int32_t pre_rope; /* key space */
  int32_t layout;   /* of the codes: KVPACK_PLAIN or KVPACK_TILES (see plugins.vqkv.layout). With tiles the last bits of
                       a step of one token depend on the batch's size, never on the other sequences */
  int32_t sets;     /* T */
  int32_t k_groups, v_groups, k_entries, v_entries;
  int32_t k_stage_count, v_stage_count;
  int32_t k_stages[KVPACK_MAX_STAGES], v_stages[KVPACK_MAX_STAGES]; /* groups coded by each stage */
  void *ring_k, *ring_v;                                            /* [B, H, sinks + window + block, D] */
  int8_t *codes_k, *codes_v;                                        /* [B, H, code_rows, L]; code - entries / 2 */
  int32_t code_rows;                                                /* the trash row (or tile) included */
  const float *k_books, *k_encode, *k_decode, *k_mean; /* [T, L, entries, d], [T, D, D] twice, [H, D] */
  const float *v_books, *v_encode, *v_decode, *v_mean;
  const void *prepared; /* what kvpack_vqkv_prepare wrote */
} kvpack_vqkv;

/* Bytes of, and the making of, the tables in the form the kernels read: once per layer, kept by the caller. */
KVPACK_API size_t kvpack_vqkv_prepared(const kvpack_layer *, const kvpack_vqkv *);
KVPACK_API int kvpack_vqkv_prepare(const kvpack_layer *, const kvpack_vqkv *, void *prepared, void *stream);
KVPACK_API size_t kvpack_vqkv_workspace(const kvpack_layer *, const kvpack_step *, const kvpack_vqkv *);
KVPACK_API int kvpack_vqkv_attention(const kvpack_layer *, const kvpack_step *, const kvpack_vqkv *);

/* DeltaKVAttention. X = 2 H D. */
typedef struct {
  kvpack_geometry geometry;
  int32_t stride, neighbors, reference_bits, hidden, selects;
  int32_t segment_count;
  int32_t latent_sizes[KVPACK_MAX_SEGMENTS], latent_bits[KVPACK_MAX_SEGMENTS];
  int32_t index_bytes; /* of one index: 2 or 4 */
  void *ring;          /* [B, 1, sinks + window + block, X] */
  void *latents;       /* int8 [B, 1, code_rows, sum(sizes * bits) / 8], or 16-bit [.., latent_dim] */
  void *scales;        /* [B, 1, code_rows, segments]; NULL where latents are 16-bit */
  void *index;         /* [B, 1, code_rows, neighbors] reference ordinals */
  void *references;    /* [B, 1, ref_rows, X], 16-bit or int8 */
  void *reference_scales; /* [B, 1, ref_rows, 1]; NULL with 16-bit references */
  int32_t code_rows, ref_rows;
  const int32_t *selected, *select_len; /* [B, M], [B]: code rows to read; NULL: all. With S > 1 it names all */
  int32_t select_width;                 /* M */
  const float *center, *compress, *decompress, *gate, *up, *down; /* see plugins.deltakv.reference.LayerCodec */
  const void *prepared;
} kvpack_deltakv;

KVPACK_API size_t kvpack_deltakv_prepared(const kvpack_layer *, const kvpack_deltakv *);
KVPACK_API int kvpack_deltakv_prepare(const kvpack_layer *, const kvpack_deltakv *, void *prepared, void *stream);
KVPACK_API size_t kvpack_deltakv_workspace(const kvpack_layer *, const kvpack_step *, const kvpack_deltakv *);
KVPACK_API int kvpack_deltakv_attention(const kvpack_layer *, const kvpack_step *, const kvpack_deltakv *);

/* IntKVAttention. */
typedef struct {
  kvpack_geometry geometry;
  int32_t pre_rope, k_bits, v_bits, k_channel; /* k_channel: keys share scales along a block's tokens */
  int32_t group, rotation, mean;               /* group 0: one scale per row */
  void *ring_k, *ring_v;                       /* [B, H, sinks + window + block, D] */
  int8_t *codes_k, *codes_v;                   /* [B, H, code_rows, D * bits / 8] */
  void *scales_k, *zeros_k, *scales_v, *zeros_v; /* [B, H, code_rows or scale_rows, scales per row] */
  int32_t code_rows, scale_rows;                 /* scale_rows: rows of scales_k with k_channel */
  const float *center;                           /* [2, H, D] of keys and values; NULL without mean */
} kvpack_intkv;

KVPACK_API size_t kvpack_intkv_workspace(const kvpack_layer *, const kvpack_step *, const kvpack_intkv *);
KVPACK_API int kvpack_intkv_attention(const kvpack_layer *, const kvpack_step *, const kvpack_intkv *);

/* Whether this library has kernels for a layer; KVPACK_UNSUPPORTED with the reason in kvpack_last_error otherwise. Only
 * sizes and attributes are read, no pointer. */
KVPACK_API int kvpack_dense_supported(const kvpack_layer *, const kvpack_dense *);
KVPACK_API int kvpack_vqkv_supported(const kvpack_layer *, const kvpack_vqkv *);
KVPACK_API int kvpack_deltakv_supported(const kvpack_layer *, const kvpack_deltakv *);
KVPACK_API int kvpack_intkv_supported(const kvpack_layer *, const kvpack_intkv *);

/* -- what lies between the attentions of a model; rows of `columns` numbers of `dtype`, nothing of it is required */

enum { KVPACK_SILU = 0, KVPACK_GELU_TANH = 1, KVPACK_GELU = 2 };

/* sum = x + y and out = sum / rms(sum) * weight: ONNX's RMSNormalization of the rounded sum over its last axis, with
 * stash_type 1. x, y, sum, out [rows, columns], weight [columns]. sum may be x or y. */
KVPACK_API int kvpack_add_rms_norm(int32_t dtype, int64_t rows, int32_t columns, float epsilon, const void *x,
                                   const void *y, const void *weight, void *sum, void *out, void *stream);
/* out = activation(gate) * up, the activation in float32 and rounded. x [rows, 2, columns]: gate, up; out [rows,
 * columns]. */
KVPACK_API int kvpack_gated_activation(int32_t dtype, int32_t activation, int64_t rows, int32_t columns, const void *x,
                                       void *out, void *stream);

/* What the last failed call of this thread had to say: one sentence, valid until the next call. */
KVPACK_API const char *kvpack_last_error(void);
KVPACK_API int32_t kvpack_abi(void);

#ifdef __cplusplus
}
#endif
#endif
