/* ProcessPrng, from which Rust's standard library gets its random numbers: Wine has it since 9.2, and Debian 12 has Wine 8. */
#include <stddef.h>

unsigned char __stdcall SystemFunction036(void *bytes, unsigned long length); /* RtlGenRandom */

__declspec(dllexport) int __stdcall ProcessPrng(unsigned char *bytes, size_t length) {
  return SystemFunction036(bytes, (unsigned long)length);
}
