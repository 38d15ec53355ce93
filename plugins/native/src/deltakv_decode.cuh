// How DeltaKV's decode step takes a latent: in slots of 32 values. A strip of 32 stored bytes (64 with 16 bits) holds
// 8 / bits slots, one for each field of its bytes; the last strip of a segment is filled up with values that meet zeros
// in the matrices. Places in a slot are in the order in which an mma wants them, so that stored codes become operands
// in registers, as rows (for keys) and as columns (for the weighted sum of latents).
#pragma once
#include "deltakv.cuh"

namespace kvpack {
namespace {

constexpr int SLOT = 32, MAX_SLOTS = 80;

struct Slot {
  uint16_t offset;  // of its strip in a staged row, in bytes
  int16_t first;    // value at its first place
  uint8_t real;     // so many places hold values, the rest is filling
  uint8_t shift, bits, segment;
};
struct LatentSlots {
  int count, segments, piece;  // piece: bytes to copy at once
  int row_bytes, stride;       // of a row as stored, and as staged in shared memory
  int source[KVPACK_MAX_SEGMENTS], target[KVPACK_MAX_SEGMENTS], bytes[KVPACK_MAX_SEGMENTS];
  Slot slots[MAX_SLOTS];
};
// Which values the slots hold; count 0: there is no room for so many.
inline LatentSlots latent_slots(const kvpack_deltakv &d) {
  LatentSlots all = {};
  all.segments = d.segment_count;
  int source = 0, target = 0, first = 0, joint = 0;
  for (int n = 0; n < d.segment_count; ++n) {
    const int bits = d.latent_bits[n], size = d.latent_sizes[n], fields = bits == 16 ? 1 : 8 / bits;
    const int strip = bits == 16 ? 64 : 32, bytes = size * bits / 8, each = size / fields;  // values of a field
    const int strips = (each + SLOT - 1) / SLOT;
    all.source[n] = source, all.target[n] = target, all.bytes[n] = bytes;
    for (int s = 0; s < strips; ++s)
      for (int field = 0; field < fields; ++field) {
        if (all.count == MAX_SLOTS) return {};
        const int real = min(each - s * SLOT, SLOT);
        all.slots[all.count++] = {uint16_t(target + s * strip), int16_t(first + field * each + s * SLOT),
                                  uint8_t(real), uint8_t(field * bits), uint8_t(bits), uint8_t(n)};
      }
    source += bytes, target += strips * strip, first += size, joint |= source | bytes;
  }
  all.row_bytes = source;
  all.piece = joint % 16 == 0 ? 16 : joint % 4 == 0 ? 4 : 2;
  all.stride = (target + 127) / 128 * 128 + 16;  // rows are four banks apart
  return all;
}

// The work of four warps, a team, on a tile of rows: `across` warps share the D columns of the keys, `down` the rows.
template <int HEAD> struct Tile {
  static constexpr int D = HEAD, ACROSS = D == 256 ? 4 : 2, DOWN = 4 / ACROSS, ROWS = 32 * DOWN;
  static constexpr int BLOCKS = D / ACROSS / 8;                             // of 8 columns, of a warp
  static constexpr int PIECE = BLOCKS % 8 == 0 ? 8 : BLOCKS % 4 == 0 ? 4 : 2;  // pairs read at once
  static constexpr int EACH = D == 256 ? 8 : 4, SUMMING = D / (8 * EACH);  // value dimensions of a lane; warps with any
};
// Keys' columns are ordered by pairs, the two halves of a rotation side by side; a lane of quad place `lane % 4` holds
// the consecutive pairs pair_of(.., 0) .. pair_of(.., BLOCKS - 1), one in each block.
template <class Shape> KVPACK_D int pair_of(int across, int lane, int block) {
  return (across * 4 + (lane & 3)) * Shape::BLOCKS + block;
}
KVPACK_D int pair_dimension(int pair, int second, int half) {
  return pair < half ? pair + second * half : 2 * pair + second;
}

// How the codes of a slot are read. SPLICED, 2 or 4 bits: into the mantissa of 16, which is exact. BYTES: the same into
// 256 where the mantissa is long enough. WHOLE: 16-bit latents as they are. Operands are larger than the latents by
// `middle` and lack the scale: what a product has too much is known beforehand, and scales apply to its rows.
enum class Codes { SPLICED, BYTES, WHOLE };
KVPACK_D Codes codes_of(const Slot &slot) {
  return slot.bits < 8 ? Codes::SPLICED : slot.bits == 8 ? Codes::BYTES : Codes::WHOLE;
}
struct Splice {
  int shift;
  uint32_t mask, rest;
};
template <class T> constexpr bool IS_HALF = std::is_same_v<T, half_t>;
template <class T> constexpr int SPLICE_AT = IS_HALF<T> ? 6 : 3;  // place of a code of 4 bits in the mantissa
template <class T> KVPACK_D float middle_of(const Slot &slot) {
  return slot.bits == 4 ? 16 + 7.5f : slot.bits == 2 ? 16 + 1.5f : slot.bits == 8 && IS_HALF<T> ? 256 + 127.5f : 0;
}
template <class T> KVPACK_D Splice splice_of(const Slot &slot) {
  const uint32_t codes = slot.bits == 4 ? 0x000F000Fu : 0x00030003u;
  // Stored bytes are less 128: the highest bit is the other way round.
  const uint32_t wrong = slot.shift + slot.bits == 8 ? codes ^ codes >> 1 & 0x00070007u : 0;
  return {slot.shift - SPLICE_AT<T>, codes << SPLICE_AT<T>, (IS_HALF<T> ? 0x4C004C00u : 0x41804180u) ^ wrong << SPLICE_AT<T>};
}
KVPACK_D uint32_t rotated_right(uint32_t x, int n) { return x >> (n & 31) | x << (-n & 31); }
// Two operands: the codes that `up` and the slot's own shift reach in either half of `word`.
template <class T, Codes CODES> KVPACK_D uint32_t code_pair(uint32_t word, const Splice &splice, int up) {
  if constexpr (CODES == Codes::SPLICED) {
    return and_xor(rotated_right(word, splice.shift + up), splice.mask, splice.rest);
  } else if constexpr (IS_HALF<T>) {
    return (rotated_right(word, up - 2) & 0x03FC03FCu) ^ 0x5E005E00u;
  } else {
    word ^= 0x80808080u;
    const float low = bits_as<float>(0x4B000000u | (word >> up & 255)) - 8388608.f;
    const float high = bits_as<float>(0x4B000000u | (word >> (up + 16) & 255)) - 8388608.f;
    return pack2<T>(low - 127.5f, high - 127.5f);
  }
}

}  // namespace
}  // namespace kvpack
