  Serial.print("@port@:");
  for (int k = 0; k < @count@; k++) {
    Serial.print(" ");
    Serial.print((long)output_@port@[k]);
  }
  Serial.println();
