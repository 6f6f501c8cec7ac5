// The scales of a quantised cache, token by token.
// Included inside the namespace of one instruction set, after page_walk.inl.

// The scale of a head that is one for all tokens, or the first group's.
inline const float* scale_of(const ScaleView& view, int64_t head) {
  if (!view.data) return &view.uniform;
  return reinterpret_cast<const float*>(reinterpret_cast<const char*>(view.data) + head * view.stride_head);
}

// Calls f(token - begin, its scale, or its first group's) for the tokens [begin, end) of a KV head.
template <class F>
inline void for_each_scale(const PageWalk& walk, const ScaleView& view, int64_t head, int begin, int end,
                           F&& f) {
  if (!view.per_token) {
    const float* const scale = scale_of(view, head);
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
