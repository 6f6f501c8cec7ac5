// The scales of a quantised cache, token by token.
// Included inside the namespace of one instruction set, after page_walk.inl.

// Those of the tokens [begin, end) for a KV head.
inline void load_scales(const PageWalk& walk, const ScaleView& view, int64_t head, int begin, int end,
                        float* scales) {
  const auto scale_at = [&](const char* at) {
    return *reinterpret_cast<const float*>(at + head * view.stride_head);
  };
  if (!view.per_token) {
    const float scale = view.data ? scale_at(reinterpret_cast<const char*>(view.data)) : view.uniform;
    for (int at = begin; at < end; at++) *scales++ = scale;
    return;
  }
  walk.for_each_place(begin, end, [&](int64_t block, int32_t in_block, int run) {
    const char* at = walk.at(view, block, in_block);
    for (int i = 0; i < run; i++, at += view.stride_token) *scales++ = scale_at(at);
  });
}
