"""What the training data of the specialist is made of: for each action, ways to ask for it and what is said back.

`{...}` in a core is a slot, filled from VALUES; `TARGETS` says what becomes the answer's `target`. None of these
wordings is used by a fixture of the suite mac-actions: tests/judge/test_mac_actions.py holds the two apart.
"""

from dataclasses import dataclass

VALUES: dict[str, tuple[str, ...]] = {
    "app": (
        "Safari", "Mail", "Notes", "Calendar", "Music", "Photos", "Maps", "Messages", "Reminders", "Terminal", "Finder",
        "Podcasts", "Books", "Numbers", "Pages", "Contacts", "Stocks", "Clock", "Calculator", "Dictionary", "Chess",
        "Firefox", "Chrome", "Slack", "Zoom", "Spotify", "Xcode", "Discord", "Telegram", "Photoshop", "Word", "Excel",
        "Figma", "Steam", "Signal", "TextEdit", "System Settings", "Activity Monitor", "Voice Memos",
        "QuickTime Player", "Notion", "Obsidian", "Evernote", "Dropbox", "VLC", "HandBrake", "Audacity", "Inkscape",
        "Thunderbird", "Opera", "Skype", "Logic Pro", "iMovie", "Automator", "Font Book", "Disk Utility", "Console",
        "Weather", "Home", "Freeform", "Shortcuts", "Stickies", "Tetris", "Minecraft", "Postman", "Docker", "PyCharm",
        "Bear", "Things", "Ulysses", "Scrivener", "Sketch", "Day One", "Reeder", "Transmit", "Affinity Photo",
        "Keychain Access", "Image Capture", "OmniFocus", "Trello", "Lightroom", "Illustrator", "PowerPoint", "OneNote",
    ),
    "file": tuple(
        f"{stem}.{ext}"
        for stem, ext in (
            ("report", "pdf"), ("budget", "xlsx"), ("holiday", "jpg"), ("draft", "docx"), ("notes", "txt"), ("song",
            "mp3"),
            ("invoice_07", "pdf"), ("logo", "png"), ("backup", "zip"), ("slides", "key"), ("index", "html"), ("todo",
            "md"),
            ("letter", "pages"), ("recipe", "txt"), ("scan-12", "tiff"), ("train_times", "csv"), ("interview", "m4a"),
            ("old_cv", "doc"), ("poster", "ai"), ("clip", "mov"), ("lecture3", "pptx"), ("map", "svg"), ("keys",
            "json"),
            ("garden", "heic"), ("minutes-may", "rtf"), ("tax2023", "pdf"), ("ideas", "txt"), ("script", "py"),
        )
    )
    # So many that names have to be copied, not remembered.
    + tuple(
        f"{stem}.{ext}"
        for stem in (
            ("essay", "photo_3", "contract", "timetable", "house_plan", "menu-june", "playlist", "thesis_v2", "receipt",
             "passport", "kitchen", "setup", "readme", "offer_b", "survey", "archive_old", "cat", "beach-09", "cellar",
             "trailer", "team_list", "chapter4", "novel", "quiz", "award", "bill_march", "voice-memo", "flyer", "graph",
             "data_2022", "mixtape", "storyboard", "wedding", "ticket_b7", "manual", "wallpaper", "sketch-5", "answer")
        )
        for ext in ("pdf", "txt", "png", "docx", "zip", "mov", "jpg", "csv", "key")
    ),
    "percent": tuple(str(percent) for percent in range(1, 101)),
    "duration": (
        *("1 minute", "1 hour", "half an hour"), *(f"{minutes} minutes" for minutes in range(2, 60)),
        *(f"{hours} hours" for hours in range(2, 11)), *(f"{seconds} seconds" for seconds in range(10, 100, 5)),
    ),
    "music": (
        "jazz", "some Bach", "the Beatles", "piano music", "my workout playlist", "Miles Davis", "rain sounds",
        "folk songs", "Bob Marley", "Vivaldi", "the radio", "something slow", "Daft Punk", "cello suites", "Queen",
        "my evening mix", "disco", "Johnny Cash", "ocean waves", "the soundtrack of Rocky", "heavy metal",
        "Nina Simone", "the new album", "classical music", "old blues", "lullabies", "Kraftwerk", "film music",
        "Mozart",
    ),
    "task": (
        "call Anna", "buy milk", "pay the rent", "water the plants", "send the invoice", "book the dentist",
        "feed the cat", "ask Paul for the drill", "fix the bike", "bring the ladder back", "vote on Sunday",
        "bake the bread", "study chapter six", "move the meeting", "mail the contract", "walk with Emma", "stretch",
        "back up the laptop", "sign the form", "change the bulb", "thank the neighbours", "weigh the suitcase",
        "pick up the parcel", "renew my passport", "wish Tom a happy birthday", "take the pills", "return the books",
        "charge the car", "wash the curtains", "write to grandma", "check the oven", "clean the filter",
        "order new shoes",
    ),
    "text": (
        "the code is 4711", "eggs, flour and butter", "Lena likes blue", "gate 12 at noon", "try the soup again",
        "the plumber comes on Friday", "size 42", "idea for a short film", "seat 14A", "ask about the discount",
        "parking level 3", "Ida is allergic to nuts", "the wifi password is on the fridge", "two litres of paint",
        "trains leave every ten minutes", "rehearsal is moved to May", "the left key is the right one", "buy chalk",
        "chapter two needs a map", "the paint is called sage", "blue folder, second shelf",
    ),
    "site": (
        "wikipedia.org", "example.com", "news.example.org", "python.org", "weather.example.net", "openstreetmap.org",
        "library.example.edu", "apple.com", "kernel.org", "mail.example.com", "gutenberg.org", "archive.org",
        "shop.example.net", "cooking.example.org", "trains.example.com", "chess.example.net", "bank.example.org",
        "museum.example.edu", "radio.example.com", "garden.example.net", "debian.org", "rust-lang.org", "w3.org",
    ),
    "folder": (
        "Downloads", "Documents", "Desktop", "Pictures", "Movies", "Applications", "Taxes", "Projects", "Letters",
        "Recipes", "Archive", "Work", "Homework", "Scans", "Music", "Photos 2019", "Bills", "Garden", "School",
        "Clients", "Drafts", "Old Stuff", "Backups", "Fonts", "Games", "Travel Plans", "Thesis",
    ),
    "switch": (
        "wifi", "bluetooth", "dark mode", "do not disturb", "night shift", "airdrop", "low power mode", "the hotspot",
        "location services", "true tone",
    ),
    "disk": ("Backup", "USB stick", "Photos drive", "Scratch", "the SD card", "Time Capsule", "Media", "the old drive",
        "Archive 2", "Blue Stick", "Films", "the external disk", "Data", "Server", "Camera card", "Mirror"),
    "city": ("Rome", "Oslo", "Lisbon", "Kyoto", "Boston", "Vienna", "Lima", "Cairo"),
    "person": ("Anna", "my boss", "Tom", "the bank", "my sister", "Doctor Weiss", "the landlord"),
    "food": ("a pizza", "sushi", "two burgers", "flowers", "a cake", "groceries"),
}  # fmt: skip


@dataclass(frozen=True)
class Intent:
    """One action: its cores, the spoken lines, which slot (or fixed text) is the target, and whether it must confirm.

    A spoken line may use the slot as `{target}`; with several lines the core's number chooses, so that the same words
    always get the same answer.
    """

    kind: str
    action: str
    cores: tuple[str, ...]
    say: tuple[str, ...]
    target: str = ""
    confirm: bool = False


# Frames around a core that asks for something, every opening with every closing. `{}` is the core.
OPENINGS = (
    "", "", "", "please ", "can you ", "could you ", "hey, ", "would you ", "i need you to ", "just ", "okay, ",
    "can you please ", "i want you to ", "so, ", "listen, ", "now ", "computer, ", "if you can, ", "i'd ask you to ",
)  # fmt: skip
CLOSINGS = (
    "", "", "", "", " please", ", thanks", " now", " for me", " straight away", " as soon as you can", " again",
)  # fmt: skip
FRAMES = tuple(
    opening + "{}" + closing + ("?" if opening.startswith(("can", "could", "would")) else "")
    for opening in OPENINGS
    for closing in CLOSINGS
)
# Frames around what is said in conversation.
TALK_FRAMES = (
    "{}", "{}", "{}", "hey, {}", "well, {}", "{}!", "oh, {}", "so, {}", "by the way, {}"
)  # fmt: skip
