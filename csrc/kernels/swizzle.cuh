// How 16 rows of K or V lie in shared memory, so that no access pattern of attention meets a bank twice.
#pragma once
#include "core/dtype.h"
#include "kernels/attention_args.h"

namespace paged_ops::kernels {

// A slot holds kTileTokens rows of kRowNbytes, seen as pieces of 16 bytes. Piece p of row r lies at piece
// p ^ (r mod 8) of its row (rows of 64 bytes: p ^ (r / 2 mod 4)): the 8 rows that an ldmatrix reads at one
// piece number fall in 8 different 16-byte columns, i.e. in all 32 banks.
template <int kRowNbytes>
struct SwizzledSlot {
  static constexpr int kPieces = kRowNbytes / 16;
  static constexpr int kNbytes = kTileTokens * kRowNbytes;

  static PAGED_OPS_HOST_DEVICE constexpr unsigned key(int row) {
    return kPieces >= 8 ? unsigned(row) & 7 : unsigned(row) >> 1 & 3;
  }
  static PAGED_OPS_HOST_DEVICE constexpr unsigned at(int row, int piece) {
    return row * kRowNbytes + ((unsigned(piece) ^ key(row)) << 4);
  }
  // The same, seen from a lane that holds `from` = at(row, piece): `pieces`, an even constant, further on.
  // XOR distributes, so that a few lane constants and immediate offsets serve the whole slot.
  static PAGED_OPS_HOST_DEVICE constexpr unsigned right(unsigned from, int pieces) {
    return (from ^ (unsigned(pieces) & 7) << 4) + (pieces >> 3) * 128;
  }
  // ... and `rows`, a constant that has no bit in common with the lane's row, further down.
  static PAGED_OPS_HOST_DEVICE constexpr unsigned down(unsigned from, int rows) {
    return (from ^ key(rows) << 4) + rows * kRowNbytes;
  }

  // The claims above, proven when the kernel is compiled.
  static PAGED_OPS_HOST_DEVICE constexpr bool proven() {
    for (int piece = 0; piece < kPieces; piece++)
      for (int row = 0; row < kTileTokens; row += 8) {
        unsigned columns = 0;
        for (int r = 0; r < 8; r++) columns |= 1u << (at(row + r, piece) >> 4 & 7);
        if (columns != 0xff) return false;
      }
    constexpr int kStep = kPieces < 8 ? 8 : 4;  // rows per copy instruction
    for (int row = 0; row < kTileTokens; row++)
      for (int piece = 0; piece < kPieces; piece++) {
        if (at(row, piece) != right(at(row, piece & 1), piece & ~1)) return false;
        if (at(row, piece) != down(at(row % kStep, piece & 7), row / kStep * kStep) + (piece & ~7) * 16)
          return false;
      }
    return true;
  }
};

}  // namespace paged_ops::kernels
