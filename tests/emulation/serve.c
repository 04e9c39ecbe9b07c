/* Runs compiled kernels on request: the few functions that they call, and a loop over standard input.

   A request is the memory that a kernel may touch, its number and its arguments; the answer its exit status, then
   the memory as it left it.
       int32 blocks, int32 kernel, int32 arguments, int32 zero
       for each block: int64 bytes, the bytes
       for each argument: int64 kind, then
           kind 1: int64        kind 3: double
           kind 7: int64 block, offset in it, elements, type code, bits of an element
   Parallel regions run as TASKS tasks one after the other, the last first: no task may wait for another. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TENSOR = 7, TASKS = 2, ALIGNMENT = 64, MOST = 256, CPU = 1 };

typedef struct {
  int32_t kind;
  uint32_t unused;
  union { int64_t integer; double real; void *pointer; } value;
} Any;

typedef struct { int32_t type, id; } Device;
typedef struct { uint8_t code, bits; uint16_t lanes; } Type;
typedef struct {
  void *data;
  Device device;
  int32_t rank;
  Type type;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} Tensor;

typedef int (*Kernel)(void *self, const Any *arguments, int32_t count, Any *result);
extern const Kernel KERNELS[]; /* in the generated file */

typedef struct { void *sync; int32_t tasks; } Group;
typedef int (*Task)(int number, Group *group, void *data);

int TVMBackendParallelLaunch(Task task, void *data, int tasks) {
  Group group = {NULL, tasks ? tasks : TASKS};
  for (int i = group.tasks - 1; i >= 0; --i)
    if (task(i, &group, data)) return -1;
  return 0;
}

static void *allocate(uint64_t bytes) {
  uint64_t whole = (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
  return memset(aligned_alloc(ALIGNMENT, whole), 0xff, whole); /* NaN: nobody may count on zeros */
}

void *TVMBackendAllocWorkspace(int device, int id, uint64_t bytes, int code, int bits) { return allocate(bytes); }

int TVMBackendFreeWorkspace(int device, int id, void *memory) {
  free(memory);
  return 0;
}

void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  fprintf(stderr, "%s: ", kind);
  for (int i = 0; i < count; ++i)
    if (parts[i]) fputs(parts[i], stderr);
  fputc('\n', stderr);
}

/* Kernels call through these, which a module's loader would set. */
extern void *__TVMBackendParallelLaunch __attribute__((weak));
extern void *__TVMBackendAllocWorkspace __attribute__((weak));
extern void *__TVMBackendFreeWorkspace __attribute__((weak));
extern void *__TVMFFIErrorSetRaisedFromCStrParts __attribute__((weak));

static void set(void **place, void *function) {
  if (place) *place = function;
}

static void take(void *place, size_t bytes) {
  if (fread(place, 1, bytes, stdin) != bytes) exit(3);
}

static int64_t take_number(void) {
  int64_t number;
  take(&number, sizeof number);
  return number;
}

static Tensor take_tensor(char **blocks, int64_t *elements) {
  char *block = blocks[take_number()];
  Tensor tensor = {block + take_number(), {CPU, 0}, 1, {0, 0, 1}, elements, NULL, 0};
  *elements = take_number();
  tensor.type.code = take_number();
  tensor.type.bits = take_number();
  return tensor;
}

int main(void) {
  set(&__TVMBackendParallelLaunch, TVMBackendParallelLaunch);
  set(&__TVMBackendAllocWorkspace, TVMBackendAllocWorkspace);
  set(&__TVMBackendFreeWorkspace, TVMBackendFreeWorkspace);
  set(&__TVMFFIErrorSetRaisedFromCStrParts, TVMFFIErrorSetRaisedFromCStrParts);
  struct { int32_t blocks, kernel, arguments, zero; } head;
  while (fread(&head, sizeof head, 1, stdin) == 1) {
    char *blocks[MOST];
    int64_t bytes[MOST], elements[MOST];
    Tensor tensors[MOST];
    Any arguments[MOST] = {{0}}, result = {0};
    if (head.blocks > MOST || head.arguments > MOST) return 4;
    for (int i = 0; i < head.blocks; ++i) {
      bytes[i] = take_number();
      blocks[i] = allocate(bytes[i]);
      take(blocks[i], bytes[i]);
    }
    for (int i = 0; i < head.arguments; ++i) {
      arguments[i].kind = take_number();
      if (arguments[i].kind == TENSOR) {
        tensors[i] = take_tensor(blocks, &elements[i]);
        arguments[i].value.pointer = &tensors[i];
      } else {
        take(&arguments[i].value, sizeof arguments[i].value);
      }
    }
    int32_t status = KERNELS[head.kernel](NULL, arguments, head.arguments, &result);
    fwrite(&status, sizeof status, 1, stdout);
    for (int i = 0; i < head.blocks; ++i) {
      fwrite(blocks[i], 1, bytes[i], stdout);
      free(blocks[i]);
    }
    fflush(stdout);
  }
  return 0;
}
