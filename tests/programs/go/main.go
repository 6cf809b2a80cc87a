// Churns maps, slices and the garbage collector, and prints a checksum that depends on every byte kept.
package main

import (
	"fmt"
	"hash/fnv"
	"os"
	"sort"
	"strconv"
)

type random uint64

func (r *random) next() uint64 {
	x := uint64(*r)
	x ^= x << 13
	x ^= x >> 7
	x ^= x << 17
	*r = random(x)
	return x
}

// Half of a payload is noise, half repeats, as the memory of real programs about does.
func payload(r *random, length int) []byte {
	bytes := make([]byte, length)
	for i := 0; i+8 <= length/2; i += 8 {
		word := r.next()
		for k := 0; k < 8; k++ {
			bytes[i+k] = byte(word >> (8 * k))
		}
	}
	return bytes
}

func main() {
	entries, rounds := 60000, 4
	if len(os.Args) == 3 {
		entries, _ = strconv.Atoi(os.Args[1])
		rounds, _ = strconv.Atoi(os.Args[2])
	}
	r := random(88172645463325252)
	kept := map[string][]byte{}
	lists := make([][]uint64, 256)
	for round := 0; round < rounds; round++ {
		for i := 0; i < entries/2; i++ {
			key := strconv.FormatUint(r.next()%uint64(entries), 36)
			kept[key] = payload(&r, 2048+int(r.next()%2048))
			list := r.next() % uint64(len(lists))
			lists[list] = append(lists[list], r.next())
		}
		// Garbage: a fifth of the map and a quarter of the lists.
		for i := 0; i < entries/5; i++ {
			delete(kept, strconv.FormatUint(r.next()%uint64(entries), 36))
		}
		for i := round % 4; i < len(lists); i += 4 {
			lists[i] = nil
		}
		fmt.Printf("round %d: %d keys, checksum %016x\n", round, len(kept), checksum(kept, lists))
	}
}

func checksum(kept map[string][]byte, lists [][]uint64) uint64 {
	keys := make([]string, 0, len(kept))
	for key := range kept {
		keys = append(keys, key)
	}
	sort.Strings(keys)
	hash := fnv.New64a()
	for _, key := range keys {
		hash.Write([]byte(key))
		hash.Write(kept[key])
	}
	for i, list := range lists {
		for _, word := range list {
			fmt.Fprintf(hash, "%d:%d ", i, word)
		}
	}
	return hash.Sum64()
}
