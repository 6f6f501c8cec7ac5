// The scales of a quantised cache, token by token.
// Included inside the namespace of one instruction set, after page_walk.inl.

// Calls f(token - begin, its scale, or its first group's) for the tokens [begin, end) of a KV head.
template <class F>
inline void for_each_scale(const PageWalk& walk, const ScaleView& view, int64_t head, int begin, int end,
                           F&& f) {
  if (!view.per_token) {
    const char* const base = reinterpret_cast<const char*>(view.data) + head * view.stride_head;
    const float* const scale = view.data ? reinterpret_cast<const float*>(base) : &view.uniform;
    for (int i = 0; i < end - begin; i++) f(i, scale);
    return;
  }
  int i = 0;
  walk.for_each_place(begin, end, [&](int64_t block, int32_t in_block, int run) {
    const char* at = walk.at(view, block, in_block) + head * view.stride_head;
    for (const int last = i + run; i < last; i++, at += view.stride_token)
      f(i, reinterpret_cast<const float*>(at));
  });
}
