#include "sys/unique_fd.h"
