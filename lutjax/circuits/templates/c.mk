c:
	@mkdir -p build
	$(CC) -std=c99 -Wall -Wextra $(CFLAGS) -I$(dir @program@) -o build/@name@_test @test@ @program@
	./build/@name@_test
