// The AMX vocabulary: tile registers and the products on them.
// Included inside the namespace of one instruction set.
//
// Written as assembly, not with the compiler's intrinsics: those do not tell GCC 12 that memory is read and
// drop stores before them.

// Shapes of the eight tile registers; zero means that a register is not used.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_nbytes[16] = {};
  uint8_t num_rows[16] = {};

  void set(int tile, int rows, int nbytes) {
    num_rows[tile] = uint8_t(rows);
    row_nbytes[tile] = uint16_t(nbytes);
  }
};

inline void load_tile_config(const TileConfig& config) {
  asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
}
inline void release_tiles() { asm volatile("tilerelease" : : : "memory"); }

template <int kTile>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "n"(kTile));
}
template <int kTile>
inline void load_tile(const void* base, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(base), "r"(stride), "n"(kTile) : "memory");
}
template <int kTile>
inline void store_tile(void* base, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(base), "r"(stride), "n"(kTile) : "memory");
}

// sum[m][n] += a[m][2k] * b[k][2n] + a[m][2k + 1] * b[k][2n + 1] over k, for bf16 a and b. Each element of
// the sum is computed by itself, in one order: its bits do not depend on how many rows or columns there are.
template <int kSum, int kA, int kB>
inline void multiply_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(kSum), "n"(kA), "n"(kB));
}
