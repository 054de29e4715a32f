// The header of that name in CUDA's toolkit: cuda.h has what it declares.
#pragma once
#include "cuda.h"
