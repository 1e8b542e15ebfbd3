#if defined(__x86_64__)
#define FUSED8_ISA avx2
#include "step_kernel.h"
#endif
