// What attention is asked for: the rows of a layer, and what each text's rows see.

#pragma once

#include <cstdint>

// Where a sequence's rows and tokens are. attention_own.py packs this and what follows.
struct Span {
  int64_t row, rows;       // its rows among all
  int64_t first, count;    // tokens that are seen, `first` to `count - 1`; the last are the rows
  int64_t masked;          // from here on `hidden` [rows, count - masked] tells, where there is one
  const uint8_t* hidden;
  const int64_t* places;   // of tokens 0 to count - 1
};

struct Layer {
  const void *query, *keys, *values;
  void *cached_keys, *cached_values, *out;
  const float* sinks;  // of each head; null where there are none
  int64_t query_head, query_row, key_head, key_row, value_head, value_row;  // strides, in numbers
  int64_t cached_key_head, cached_value_head;
  int64_t heads, groups, width, value_width;
  float scaling, softcap;  // 0: no cap
};
