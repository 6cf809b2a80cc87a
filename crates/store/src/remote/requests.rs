//! Requests of one connection that are not yet answered, and how much of the server's window they fill.

use std::time::Instant;

/// Requests under way: what the answers' ids are looked up in.
pub(crate) const REQUESTS_MAX: usize = 1024;

/// What a request asks; its items are operations, or handles for a free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked<Op> {
    Put(Op),
    Get(Op),
    Free(u32),
    /// To free what stayed behind under this epoch and handle.
    Stray(u16, u32),
}

struct Request<Op> {
    /// As the other side repeats it; `None` when this place is free.
    id: Option<u32>,
    items: Vec<Asked<Op>>,
    bytes: usize,
    sent: Instant,
}

/// All of them.
pub(crate) struct Requests<Op> {
    requests: Vec<Request<Op>>,
    free: Vec<u32>,
    counter: u32,
    /// Bytes of them and of the answers that they will have.
    pub(crate) bytes: usize,
}

impl<Op: Copy> Requests<Op> {
    /// None, and room for items of `batch` pages each.
    pub(crate) fn new(batch: usize, now: Instant) -> Self {
        let empty = || Request { id: None, items: Vec::with_capacity(batch), bytes: 0, sent: now };
        Self {
            requests: (0..REQUESTS_MAX).map(|_| empty()).collect(),
            free: (0..u32::try_from(REQUESTS_MAX).expect("few")).rev().collect(),
            counter: 0,
            bytes: 0,
        }
    }

    /// Requests under way.
    pub(crate) fn len(&self) -> usize {
        self.requests.len() - self.free.len()
    }

    /// Notes a request and gives its id; `None` when too many are under way. `bytes` are its own and its answer's.
    pub(crate) fn add(&mut self, items: impl Iterator<Item = Asked<Op>>, bytes: usize, now: Instant) -> Option<u32> {
        let at = self.free.pop()?;
        // The count tells a late or invented answer from the one that is waited for.
        self.counter = self.counter.wrapping_add(1);
        let id = self.counter << 16 | at;
        let request = &mut self.requests[at as usize];
        request.id = Some(id);
        request.items.clear();
        request.items.extend(items);
        (request.bytes, request.sent) = (bytes, now);
        self.bytes += bytes;
        Some(id)
    }

    /// What was asked under an id; `None` if nothing was.
    pub(crate) fn items(&self, id: u32) -> Option<&[Asked<Op>]> {
        let request = self.requests.get((id & 0xffff) as usize)?;
        (request.id == Some(id)).then_some(&request.items[..])
    }

    /// Forgets a request that was answered.
    pub(crate) fn end(&mut self, id: u32) {
        let at = id & 0xffff;
        let request = &mut self.requests[at as usize];
        assert_eq!(request.id.take(), Some(id), "a request is answered once");
        self.bytes -= request.bytes;
        self.free.push(at);
    }

    /// When the request was sent that has waited longest.
    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.requests.iter().filter(|request| request.id.is_some()).map(|request| request.sent).min()
    }

    /// Takes any request that is not answered.
    pub(crate) fn take_any(&mut self) -> Option<Vec<Asked<Op>>> {
        let id = self.requests.iter().find_map(|request| request.id)?;
        let items = self.items(id)?.to_vec();
        self.end(id);
        Some(items)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_find_their_request_once() {
        let now = Instant::now();
        let mut requests = Requests::new(2, now);
        let ids: Vec<u32> =
            (0..3).map(|n| requests.add([Asked::Put(n), Asked::Get(n)].into_iter(), 10, now).unwrap()).collect();
        assert_eq!((requests.len(), requests.bytes), (3, 30));
        assert_eq!(requests.items(ids[1]), Some(&[Asked::Put(1), Asked::Get(1)][..]));
        requests.end(ids[1]);
        assert_eq!(requests.items(ids[1]), None);
        let again = requests.add([Asked::Free(9)].into_iter(), 5, now).unwrap();
        assert_ne!(again, ids[1]);
        for id in [0, u32::MAX, ids[1], again ^ 1 << 20] {
            assert_eq!(requests.items(id), None);
        }
        assert_eq!((0..4).filter_map(|_| requests.take_any()).count(), 3);
        assert_eq!((requests.len(), requests.bytes), (0, 0));
    }

    #[test]
    fn there_are_no_more_than_fit() {
        let now = Instant::now();
        let mut requests = Requests::<u8>::new(1, now);
        for _ in 0..REQUESTS_MAX {
            assert!(requests.add([Asked::Free(1)].into_iter(), 1, now).is_some());
        }
        assert!(requests.add([Asked::Free(1)].into_iter(), 1, now).is_none());
    }
}
