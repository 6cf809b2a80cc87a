//! Files that fill up, are damaged, or are cut short.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown};

use crate::common::{PATIENCE, client, page, refusal};
use spillway_store::{Handle, StoreError};

/// A file that is removed with the test.
struct Path(String);

impl Path {
    fn new(name: &str) -> Self {
        Self(format!("/dev/shm/spillway-{name}-{}", std::process::id()))
    }

    fn url(&self) -> String {
        format!("file://{}?size=1M", self.0)
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_full_file_declines_and_takes_again() {
    let path = Path::new("full");
    let mut client = client(&path.url());
    let mut pages: Vec<(u64, Handle)> = Vec::new();
    let full = loop {
        match client.put(&page(pages.len() as u64), None, PATIENCE) {
            Ok(handle) => pages.push((pages.len() as u64, handle)),
            Err(error) => break error,
        }
    };
    assert_eq!((full, pages.len()), (StoreError::Full, 256));
    for (number, handle) in pages.drain(..100) {
        assert!(*client.get(handle).unwrap() == page(number));
        client.store().free(handle);
    }
    pages.extend((1000..1100).map(|number| (number, client.put(&page(number), None, PATIENCE).unwrap())));
    for (number, handle) in pages {
        assert!(*client.get(handle).unwrap() == page(number));
    }
}

#[test]
fn damage_is_noticed_and_a_file_cut_short_loses_what_was_there() {
    let path = Path::new("damaged");
    let mut client = client(&path.url());
    let handles: Vec<Handle> = (0..3).map(|number| client.put(&page(number), None, PATIENCE).unwrap()).collect();
    let disk = OpenOptions::new().write(true).open(&path.0).unwrap();
    disk.write_all_at(b"!", 4096 + 77).unwrap();
    disk.set_len(2 * 4096).unwrap();
    assert!(*client.get(handles[0]).unwrap() == page(0));
    assert_eq!(client.get(handles[1]).map(drop), Err(StoreError::Corrupt));
    assert_eq!(client.get(handles[2]).map(drop), Err(StoreError::Lost));
    // And stay so, until they are freed.
    assert_eq!(client.get(handles[1]).map(drop), Err(StoreError::Lost));
    handles.into_iter().for_each(|handle| client.store().free(handle));
    assert_eq!(client.store().status().stored_bytes, 0);
}

#[test]
fn a_file_that_others_may_read_is_refused() {
    let path = Path::new("open");
    let set = |mode| std::fs::set_permissions(&path.0, std::fs::Permissions::from_mode(mode)).unwrap();
    drop(client(&path.url()));
    assert_eq!(std::fs::metadata(&path.0).unwrap().mode() & 0o777, 0o600, "as it is made");
    for mode in [0o644, 0o640, 0o620, 0o602] {
        set(mode);
        assert!(refusal(&path.url()).contains(&format!("`chmod 600 {}`", path.0)), "{mode:o}");
    }
    set(0o600);
    drop(client(&path.url()));
    // Only root can give it away.
    if chown(&path.0, Some(65534), None).is_ok() {
        assert!(refusal(&path.url()).contains("it belongs to another user"));
    }
}
