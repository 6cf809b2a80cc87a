import java.util.ArrayList;
import java.util.HashMap;
import java.util.SplittableRandom;
import java.util.zip.CRC32;

/** Churns a HashMap and byte arrays through several collections, and prints checksums of all that is kept. */
public class Churn {
    public static void main(String[] arguments) {
        int entries = arguments.length > 0 ? Integer.parseInt(arguments[0]) : 60000;
        int rounds = arguments.length > 1 ? Integer.parseInt(arguments[1]) : 4;
        SplittableRandom random = new SplittableRandom(42);
        HashMap<Integer, byte[]> kept = new HashMap<>();
        ArrayList<String> names = new ArrayList<>();
        for (int round = 0; round < rounds; round++) {
            for (int i = 0; i < entries / 2; i++) {
                kept.put(random.nextInt(entries), payload(random));
                if (i % 4 == 0) names.add("name " + random.nextLong());
            }
            for (int i = 0; i < entries / 5; i++) kept.remove(random.nextInt(entries));
            if (round % 2 == 1) names.subList(0, names.size() / 2).clear();
            System.gc();
            System.out.printf("round %d: %d keys, %d names, checksum %08x%n", round, kept.size(), names.size(), checksum(kept, names, entries));
        }
    }

    /** Half noise, half zeros, as the memory of real programs about is. */
    private static byte[] payload(SplittableRandom random) {
        byte[] bytes = new byte[2048 + random.nextInt(2048)];
        for (int i = 0; i + 8 <= bytes.length / 2; i += 8) {
            long word = random.nextLong();
            for (int k = 0; k < 8; k++) bytes[i + k] = (byte) (word >>> 8 * k);
        }
        return bytes;
    }

    private static long checksum(HashMap<Integer, byte[]> kept, ArrayList<String> names, int entries) {
        CRC32 crc = new CRC32();
        for (int key = 0; key < entries; key++) {
            byte[] value = kept.get(key);
            if (value == null) continue;
            crc.update(key);
            crc.update(value);
        }
        for (String name : names) crc.update(name.getBytes());
        return crc.getValue();
    }
}
