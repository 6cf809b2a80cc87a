//! Whatever a server sends is an answer, the beginning of one, or refused; so are its challenge and its reply.

use spillway_wire::answer::{self, Answer, AnswerBody, Got, GotHead, PageStatus, To};
use spillway_wire::hello::{self, HELLO_BYTES, Reply, Transcript};
use spillway_wire::{Content, frame};

/// Holds one input to it.
pub fn check(bytes: &[u8]) {
    let transcript = Transcript { token: b"token", challenge: &[1; 32], hello: &[2; HELLO_BYTES] };
    if let Ok(Some((Reply::Welcome(_), _))) = transcript.decode(bytes) {
        panic!("a proof was guessed");
    }
    if let Some(challenge) = bytes.first_chunk() {
        let _ = hello::decode_challenge(challenge);
    }
    match Answer::decode(bytes) {
        Err(_) => {}
        Ok(None) => assert!(bytes.len() < frame::FRAME_BYTES_MAX),
        Ok(Some((answer, len))) => {
            let mut again = Vec::new();
            let to = To { id: answer.id, condition: answer.condition };
            match answer.body {
                AnswerBody::Put(statuses) => {
                    let statuses: Vec<PageStatus> = statuses.collect();
                    answer::put(&mut again, to, &statuses);
                }
                AnswerBody::Get(pages) => {
                    let heads: Vec<GotHead> = pages
                        .map(|page| GotHead {
                            checksum: page.checksum,
                            what: match page.content {
                                Ok(Content::Bytes(_)) => Got::Bytes,
                                Ok(Content::Zero) => Got::Zero,
                                Err(status) => Got::Not(status),
                            },
                        })
                        .collect();
                    answer::got_head(&mut again, to, heads.into_iter());
                    for page in pages {
                        if let Ok(Content::Bytes(page)) = page.content {
                            again.extend_from_slice(page);
                        }
                    }
                }
                AnswerBody::Free { pages } => answer::free(&mut again, to, pages),
                AnswerBody::Status(status) => answer::status(&mut again, to, &status),
                AnswerBody::Heartbeat => answer::heartbeat(&mut again, to),
                AnswerBody::Leave => answer::leave(&mut again, to),
                // Its id is not kept: it answers nothing.
                AnswerBody::Goodbye { code, text } => {
                    answer::goodbye(&mut again, to.condition, code, text);
                    again[8..12].copy_from_slice(&answer.id.to_le_bytes());
                }
            }
            assert_eq!(again, bytes[..len]);
        }
    }
}
