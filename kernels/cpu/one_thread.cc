#include "kernels/cpu/one_thread.h"

// libgomp comes with oneDNN. Declared here: <omp.h> belongs to the compiler, and Clang's is another
// package.
extern "C" {
int omp_get_max_threads(void);
void omp_set_num_threads(int threads);
}

namespace mk::kernels {

void use_one_thread() { omp_set_num_threads(1); }

OneThreadScope::OneThreadScope() : before_(omp_get_max_threads()) { use_one_thread(); }
OneThreadScope::~OneThreadScope() { omp_set_num_threads(before_); }

}  // namespace mk::kernels
