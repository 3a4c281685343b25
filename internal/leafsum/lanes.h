#pragma once

#include <stddef.h>
#include <stdint.h>

#define LANES 16

// leafsum_lanes writes the SHA-256 of each of n > 0 leaves to out, 32 bytes each. The leaves follow each other in data. size is that of a leaf, a multiple of 64
// bytes. The processor must have AVX-512 F and BW.
void leafsum_lanes(uint8_t *out, const uint8_t *data, size_t n, size_t size);
