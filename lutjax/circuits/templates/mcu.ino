// @title@: the answer to one sample again and again, and the time that it takes.
#include <@name@.h>

@arrays@

void setup() {
  Serial.begin(115200);
}

void loop() {
  unsigned long start = micros();
@call@
  unsigned long time = micros() - start;
@print@
  Serial.print("microseconds: ");
  Serial.println(time);
  delay(1000);
}
