// The one part of the emulator that a library holds once.
#define KVPACK_EMULATOR_MAIN
#include "emulator.h"
