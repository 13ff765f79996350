// Run by the build: the exit status is this machine's highest instruction level plus one.
#include "machine.cc"

int main() { return lutjax::highest_level() + 1; }
