/* AMX's tiles in memory, for one thread each: what the instructions do by Intel's manual, and what they refuse.
   `amx_products` gives how many products there were since it was asked last. */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TILES = 8, ROWS = 16, BYTES = 64, DAZ_AND_FTZ = 0x8040 };

static __thread struct {
    int configured;
    int rows[TILES], bytes[TILES];
    union { uint8_t raw[ROWS][BYTES]; float values[ROWS][BYTES / 4]; uint32_t pairs[ROWS][BYTES / 4]; } data[TILES];
} tile;

static long products;

long amx_products(void) { return __atomic_exchange_n(&products, 0, __ATOMIC_RELAXED); }

static void refuse(const char *why) {
    fprintf(stderr, "AMX: %s\n", why);
    abort();
}

static int used(int number) {
    if (!tile.configured || number < 0 || number >= TILES || !tile.rows[number]) refuse("a tile that there is not");
    return number;
}

void amx_ldtilecfg(const uint8_t *from) {
    memset(&tile, 0, sizeof tile);
    if (from[0] != 1 || from[1] != 0) refuse("palette or start row");
    for (int i = 2; i < 64; i++)
        if (((i < 16) || (i >= 32 && i < 48) || i >= 56) && from[i]) refuse("a reserved byte is not zero");
    for (int i = 0; i < TILES; i++) {
        tile.bytes[i] = from[16 + 2 * i] | from[17 + 2 * i] << 8;
        tile.rows[i] = from[48 + i];
        if (tile.bytes[i] > BYTES || tile.rows[i] > ROWS || !tile.bytes[i] != !tile.rows[i]) refuse("a tile's size");
    }
    tile.configured = 1;
}

void amx_tilerelease(void) { memset(&tile, 0, sizeof tile); }

void amx_tilezero(int8_t number) { memset(&tile.data[used(number)], 0, sizeof tile.data[0]); }

void amx_tileloadd64(int8_t number, const uint8_t *from, int64_t stride) {
    amx_tilezero(number);
    for (int i = 0; i < tile.rows[number]; i++)
        memcpy(tile.data[number].raw[i], from + i * stride, tile.bytes[number]);
}

void amx_tilestored64(int8_t number, uint8_t *to, int64_t stride) {
    used(number);
    for (int i = 0; i < tile.rows[number]; i++)
        memcpy(to + i * stride, tile.data[number].raw[i], tile.bytes[number]);
}

static float widened(uint32_t pair, int odd) {
    uint32_t bits = odd ? pair & 0xffff0000u : pair << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

void amx_tdpbf16ps(int8_t sums, int8_t left, int8_t right) {
    if (used(sums) == used(left) || sums == used(right) || left == right) refuse("a tile twice");
    if (tile.rows[sums] != tile.rows[left] || tile.bytes[sums] != tile.bytes[right] ||
        tile.bytes[left] != 4 * tile.rows[right]) refuse("sizes that do not fit");
    __atomic_add_fetch(&products, 1, __ATOMIC_RELAXED);
    unsigned before = _mm_getcsr();
    _mm_setcsr(0x1f80 | DAZ_AND_FTZ);
    int columns = tile.bytes[sums] / 4;
    for (int m = 0; m < tile.rows[sums]; m++) {
        float even[BYTES / 4] = {0}, odd[BYTES / 4] = {0};
        for (int k = 0; k < tile.bytes[left] / 4; k++) {
            uint32_t a = tile.data[left].pairs[m][k];
            float a0 = widened(a, 0), a1 = widened(a, 1);
            for (int n = 0; n < columns; n++) {
                even[n] = fmaf(a0, widened(tile.data[right].pairs[k][n], 0), even[n]);
                odd[n] = fmaf(a1, widened(tile.data[right].pairs[k][n], 1), odd[n]);
            }
        }
        for (int n = 0; n < columns; n++) tile.data[sums].values[m][n] += even[n] + odd[n];
    }
    _mm_setcsr(before);
}
