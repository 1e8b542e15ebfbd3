#define FUSED8_ISA generic
#include "step_kernel.h"
