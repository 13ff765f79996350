// A program that the build runs: its exit status is one more than the highest level of instructions of this machine.
#include "machine.cc"

int main() { return lutjax::highest_level() + 1; }
