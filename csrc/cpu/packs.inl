// Rows of a cache whose head dims lie in packs, from and to rows without gaps.
// Included inside the namespace of one instruction set, or of code that is compiled without any.

// How the bytes of a row lie: `count` packs of `nbytes` bytes, `stride` bytes apart.
struct Packs {
  int64_t nbytes, count, stride;

  Packs(const CacheView& cache, int head_dim, DType dtype)
      : nbytes(row_nbytes(dtype, is_plain(cache, head_dim) ? head_dim : cache.pack)),
        count(is_plain(cache, head_dim) ? 1 : head_dim / cache.pack),
        stride(cache.stride_pack) {}

  bool plain() const { return count == 1; }

  // A row without gaps from or to the cache.
  void gather(char* to, const char* from) const { copy(to, nbytes, from, stride); }
  void scatter(char* to, const char* from) const { copy(to, stride, from, nbytes); }

 private:
  template <int kNbytes>
  void copy_packs(char* to, int64_t stride_to, const char* from, int64_t stride_from) const {
    for (int64_t i = 0; i < count; i++) memcpy(to + i * stride_to, from + i * stride_from, kNbytes);
  }

  void copy(char* to, int64_t stride_to, const char* from, int64_t stride_from) const {
    switch (nbytes) {
      case 1: return copy_packs<1>(to, stride_to, from, stride_from);
      case 2: return copy_packs<2>(to, stride_to, from, stride_from);
      case 4: return copy_packs<4>(to, stride_to, from, stride_from);
      case 8: return copy_packs<8>(to, stride_to, from, stride_from);
      case 16: return copy_packs<16>(to, stride_to, from, stride_from);
      default:
        for (int64_t i = 0; i < count; i++)
          memcpy(to + i * stride_to, from + i * stride_from, size_t(nbytes));
    }
  }
};
