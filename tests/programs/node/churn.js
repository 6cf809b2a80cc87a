// Churns Buffers (outside V8's heap) and objects and strings (inside it), and prints checksums of all that is kept.
'use strict';
const { createHash } = require('crypto');

const entries = Number(process.argv[2] || 40000);
const rounds = Number(process.argv[3] || 3);

let state = 0x2545f491;
function next() {
  state ^= state << 13;
  state ^= state >>> 17;
  state ^= state << 5;
  return state >>> 0;
}

// Half noise, half zeros, as the memory of real programs about is.
function payload() {
  const bytes = Buffer.alloc(2048 + (next() % 2048));
  for (let i = 0; i + 4 <= bytes.length / 2; i += 4) bytes.writeUInt32LE(next(), i);
  return bytes;
}

const kept = new Map();
let records = [];
for (let round = 0; round < rounds; round++) {
  for (let i = 0; i < entries / 2; i++) {
    const id = next() % entries;
    kept.set(id, payload());
    records.push({ id, name: `record ${next()} of round ${round}`, tags: [next() % 100, next() % 100, String(next())] });
  }
  for (let i = 0; i < entries / 5; i++) kept.delete(next() % entries);
  records = records.filter((record) => record.tags[0] > 20);

  const hash = createHash('sha256');
  for (const id of [...kept.keys()].sort((a, b) => a - b)) hash.update(String(id)).update(kept.get(id));
  for (const record of records) hash.update(JSON.stringify(record));
  console.log(`round ${round}: ${kept.size} buffers, ${records.length} records, ${hash.digest('hex')}`);
}
