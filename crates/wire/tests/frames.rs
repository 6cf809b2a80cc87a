//! What is encoded decodes to the same, whole or in pieces; what is broken is refused.

use proptest::prelude::*;
use spillway_core::{PAGE_BYTES, Page};
use spillway_wire::answer::{self, Answer, AnswerBody, Condition, Got, GotHead, PageStatus, ServerStatus, To};
use spillway_wire::hello::Code;
use spillway_wire::request::{self, Class, PutPage, Range, Request, RequestBody};
use spillway_wire::{BATCH_MAX, Content, FREE_PAGES_MAX, Key, Malformed, checksum, frame};

/// A page that differs from those of other numbers.
fn page(number: u8) -> Page {
    std::array::from_fn(|at| at.to_le_bytes()[0].wrapping_mul(31) ^ number)
}

fn key() -> impl Strategy<Value = Key> {
    (any::<u32>(), any::<u32>()).prop_map(|(region, index)| Key { region, index })
}

/// The one request in `bytes`, which no shorter part of them is.
fn request(bytes: &[u8]) -> Request<'_> {
    for end in [0, 1, frame::REQUEST_HEADER_BYTES, bytes.len() - 1] {
        if end < bytes.len() {
            assert!(Request::decode(&bytes[..end]).expect("no error yet").is_none());
        }
    }
    let (request, len) = Request::decode(bytes).expect("well formed").expect("whole");
    assert_eq!(len, bytes.len());
    request
}

/// As [`request`].
fn answer(bytes: &[u8]) -> Answer<'_> {
    for end in [0, 1, frame::ANSWER_HEADER_BYTES - 1, bytes.len() - 1] {
        if end < bytes.len() {
            assert!(Answer::decode(&bytes[..end]).expect("no error yet").is_none());
        }
    }
    let (answer, len) = Answer::decode(bytes).expect("well formed").expect("whole");
    assert_eq!(len, bytes.len());
    answer
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn puts(id: u32, entries in prop::collection::vec((key(), any::<u64>(), any::<Option<u8>>()), 1..=BATCH_MAX)) {
        let pages: Vec<Option<Page>> = entries.iter().map(|(.., number)| number.map(page)).collect();
        let puts: Vec<PutPage<'_>> = entries.iter().zip(&pages).map(|((key, checksum, _), page)| PutPage {
            key: *key,
            checksum: *checksum,
            content: page.as_ref().map_or(Content::Zero, Content::Bytes),
        }).collect();
        let mut bytes = Vec::new();
        request::put(&mut bytes, id, &puts);
        let decoded = request(&bytes);
        prop_assert_eq!(decoded.id, id);
        let RequestBody::Put(decoded) = decoded.body else { panic!("{decoded:?}") };
        prop_assert_eq!(decoded.len(), puts.len());
        prop_assert!(decoded.eq(puts));
    }

    #[test]
    fn gets(id: u32, demand: bool, keys in prop::collection::vec(key(), 1..=BATCH_MAX)) {
        let class = if demand { Class::Demand } else { Class::Prefetch };
        let mut bytes = Vec::new();
        request::get(&mut bytes, id, class, &keys);
        let RequestBody::Get(decoded_class, decoded) = request(&bytes).body else { panic!() };
        prop_assert_eq!(decoded_class, class);
        prop_assert!(decoded.eq(keys));
    }

    #[test]
    fn frees(ranges in prop::collection::vec((any::<u32>(), 0..1u32 << 31, 1..=FREE_PAGES_MAX / 64), 1..=BATCH_MAX)) {
        let ranges: Vec<Range> = ranges
            .into_iter()
            .map(|(region, index, pages)| Range { first: Key { region, index }, pages })
            .collect();
        let mut bytes = Vec::new();
        request::free(&mut bytes, 7, &ranges);
        let RequestBody::Free(decoded) = request(&bytes).body else { panic!() };
        prop_assert!(decoded.eq(ranges));
    }

    #[test]
    fn gots(id: u32, load: u8, free_pages: u64, leaving: bool, entries in prop::collection::vec((any::<u64>(), 0u8..5), 1..=BATCH_MAX)) {
        let what = |kind| match kind {
            0 => Got::Bytes,
            1 => Got::Zero,
            2 => Got::Not(PageStatus::Missing),
            3 => Got::Not(PageStatus::Corrupt),
            _ => Got::Not(PageStatus::Full),
        };
        let heads = entries.iter().map(|(checksum, kind)| GotHead { checksum: *checksum, what: what(*kind) });
        let condition = Condition { load, free_pages, leaving };
        let mut bytes = Vec::new();
        answer::got_head(&mut bytes, To { id, condition }, heads.clone());
        for number in (0..).zip(heads.clone()).filter(|(_, head)| head.what == Got::Bytes).map(|(at, _)| at) {
            bytes.extend_from_slice(&page(number));
        }
        let decoded = answer(&bytes);
        prop_assert_eq!((decoded.id, decoded.condition), (id, condition));
        let AnswerBody::Get(decoded) = decoded.body else { panic!() };
        prop_assert_eq!(decoded.len(), entries.len());
        for ((number, head), got) in (0..).zip(heads).zip(decoded) {
            prop_assert_eq!(got.checksum, head.checksum);
            let expected = page(number);
            prop_assert_eq!(got.content, match head.what {
                Got::Bytes => Ok(Content::Bytes(&expected)),
                Got::Zero => Ok(Content::Zero),
                Got::Not(status) => Err(status),
            });
        }
    }

    #[test]
    fn any_bytes_are_decoded_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200), kind in 0u8..9, count in 0u16..70) {
        let mut bytes = bytes;
        let body = u32::try_from(bytes.len()).unwrap();
        let mut framed = [body.to_le_bytes().as_slice(), &[kind, 0], &count.to_le_bytes(), &[0; 8]].concat();
        framed.append(&mut bytes);
        if let Ok(Some((Request { body: RequestBody::Put(puts), .. }, _))) = Request::decode(&framed) {
            prop_assert_eq!(puts.len(), puts.count());
        }
        if let Ok(Some((Answer { body: AnswerBody::Get(pages), .. }, _))) = Answer::decode(&framed) {
            prop_assert_eq!(pages.len(), pages.count());
        }
    }
}

#[test]
fn short_answers() {
    let to = To { id: 9, condition: Condition { load: 3, free_pages: 1 << 40, leaving: true } };
    let mut bytes = Vec::new();
    answer::put(&mut bytes, to, &[PageStatus::Ok, PageStatus::Full]);
    let AnswerBody::Put(statuses) = answer(&bytes).body else { panic!() };
    assert!(statuses.eq([PageStatus::Ok, PageStatus::Full]));

    bytes.clear();
    answer::free(&mut bytes, to, 77);
    assert!(matches!(answer(&bytes).body, AnswerBody::Free { pages: 77 }));

    bytes.clear();
    let status = ServerStatus { capacity_bytes: 1, uptime_seconds: 14, service_p99_ns: 13, ..ServerStatus::default() };
    answer::status(&mut bytes, to, &status);
    assert!(matches!(answer(&bytes).body, AnswerBody::Status(decoded) if decoded == status));

    bytes.clear();
    answer::heartbeat(&mut bytes, to);
    assert!(matches!(answer(&bytes).body, AnswerBody::Heartbeat));
    assert!(answer(&bytes).condition.leaving);
    bytes[12] = 2;
    assert!(Answer::decode(&bytes).is_err(), "a flag that there is not");

    bytes.clear();
    answer::leave(&mut bytes, to);
    assert!(matches!(answer(&bytes).body, AnswerBody::Leave));

    bytes.clear();
    answer::goodbye(&mut bytes, to.condition, Code::Ending, &"ü".repeat(200));
    let AnswerBody::Goodbye { code: Code::Ending, text } = answer(&bytes).body else { panic!() };
    assert_eq!(text, "ü".repeat(128));
}

#[test]
fn a_server_is_asked_to_leave_or_to_stay() {
    for leaves in [true, false] {
        let mut bytes = Vec::new();
        request::leave(&mut bytes, 3, leaves);
        assert!(matches!(request(&bytes).body, RequestBody::Leave(asked) if asked == leaves));
        bytes[16] = 2;
        assert!(Request::decode(&bytes).is_err());
    }
}

#[test]
fn requests_without_a_body() {
    let mut bytes = Vec::new();
    request::status(&mut bytes, 1);
    assert!(matches!(request(&bytes).body, RequestBody::Status));
    bytes.clear();
    request::heartbeat(&mut bytes, 2);
    assert!(matches!(request(&bytes).body, RequestBody::Heartbeat));
}

/// A put of one page with some bytes changed.
fn spoilt(changes: &[(usize, u8)]) -> Option<Malformed> {
    let mut bytes = Vec::new();
    let one = page(1);
    request::put(
        &mut bytes,
        1,
        &[PutPage { key: Key::default(), checksum: checksum(&one), content: Content::Bytes(&one) }],
    );
    for (at, byte) in changes {
        bytes[*at] = *byte;
    }
    Request::decode(&bytes).err()
}

#[test]
fn lengths_and_counts_are_checked_before_they_are_used() {
    assert_eq!(spoilt(&[]), None);
    // Body lengths: too large for any frame, too small for the page, and too large for it.
    assert!(spoilt(&[(3, 0xff)]).is_some());
    assert!(spoilt(&[(0, 0x13)]).is_some());
    assert!(spoilt(&[(4, 2), (5, 0)]).is_some(), "a put read as a get");
    for (at, byte) in
        [(4, 0), (4, 8), (4, 7), (4, 6), (5, 1), (6, 0), (6, 2), (6, 65), (7, 1), (12, 1), (32, 2), (35, 1), (32, 1)]
    {
        assert!(spoilt(&[(at, byte)]).is_some(), "{at} {byte}");
    }
}

#[test]
fn ranges_end_within_their_region_and_are_limited() {
    let decode = |ranges: &[(u32, u32)]| {
        let ranges: Vec<Range> = ranges
            .iter()
            .map(|(index, pages)| Range { first: Key { region: 1, index: *index }, pages: *pages })
            .collect();
        let mut bytes = Vec::new();
        request::free(&mut bytes, 1, &ranges);
        Request::decode(&bytes).map(|_| ())
    };
    assert!(decode(&[(u32::MAX, 1), (0, FREE_PAGES_MAX - 1)]).is_ok());
    assert!(decode(&[(u32::MAX, 2)]).is_err());
    assert!(decode(&[(0, 0)]).is_err());
    assert!(decode(&[(0, 1), (0, FREE_PAGES_MAX)]).is_err());
    assert!(decode(&[(0, u32::MAX), (0, u32::MAX)]).is_err());
}

#[test]
fn the_largest_frames_are_within_the_limit() {
    let one = page(1);
    let put = PutPage { key: Key::default(), checksum: 0, content: Content::Bytes(&one) };
    let mut bytes = Vec::new();
    request::put(&mut bytes, 1, &[put; BATCH_MAX]);
    assert!(Request::decode(&bytes).is_ok_and(|request| request.is_some()));
    assert_eq!(bytes.len(), frame::REQUEST_HEADER_BYTES + frame::BODY_BYTES_MAX);
    assert!(bytes.len() <= frame::FRAME_BYTES_MAX && BATCH_MAX * PAGE_BYTES < bytes.len());
}
