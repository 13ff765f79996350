c:
	@mkdir -p build
	$(CC) -std=c99 -Wall -Wextra $(CFLAGS) -o build/@name@_test @name@_test.c @name@.c
	./build/@name@_test
