"""Every action of mac-actions with the wordings that the specialist is trained on."""

from wording import Intent

DO_IT = (
    Intent("do-it", "open_app", (
        "open {app}", "launch {app}", "start {app}", "fire up {app}", "bring up {app}", "run {app}", "show me {app}",
        "i want to use {app}", "switch to {app}", "open the app {app}", "i'd like {app} open", "take me to {app}",
        "get {app} started", "load {app}", "boot up {app}", "let me work in {app}",
        "i need {app}", "{app}, please open", "put {app} on the screen", "time for {app}", "give me {app}",
        "let's use {app}", "call up {app}", "bring {app} to the front", "have {app} come up",

    ), ("Opening {target}.",), "app"),
    Intent("do-it", "quit_app", (
        "quit {app}", "close {app}", "exit {app}", "stop {app}", "shut {app}", "i'm done with {app}", "leave {app}",
        "end {app}", "make {app} go away", "kill {app}", "i don't need {app} any more", "get out of {app}",
        "terminate {app}", "finish {app}",
        "i am finished with {app}", "close down {app}", "hide {app} by quitting it",
        "{app} can be closed", "i have had enough of {app}", "put {app} away", "turn {app} off", "quit out of {app}",

    ), ("Closing {target}.",), "app"),
    Intent("do-it", "set_volume", (
        "set the volume to {percent}", "volume to {percent} percent", "put the sound at {percent}", "volume {percent}",
        "make the volume {percent} percent", "turn the sound to {percent} percent", "change the volume to {percent}%",
        "i want the sound at {percent} percent", "set sound level {percent}", "loudness to {percent}",
        "audio level at {percent} percent", "turn the volume to {percent}", "bring the sound down to {percent}",
        "raise the volume to {percent}",
    ), ("Volume at {target} percent.",), "percent"),
    Intent("do-it", "set_brightness", (
        "set the brightness to {percent}", "brightness to {percent} percent",
        "make the screen {percent} percent bright",
        "screen brightness {percent}", "dim the screen to {percent} percent", "put the display at {percent}",
        "change the brightness to {percent}%", "display brightness {percent} percent", "light the screen at {percent}",
        "turn the brightness to {percent}", "bring the screen up to {percent} percent bright",
        "set the display light to {percent}", "lower the brightness to {percent}",
    ), ("Brightness at {target} percent.",), "percent"),
    Intent("do-it", "play_music", (
        "play {music}", "put on {music}", "i want to hear {music}", "start playing {music}", "play me {music}",
        "let me hear {music}", "listen to {music}", "i feel like {music}", "give me {music}",
        "start {music} on the speakers",
        "turn on {music} for dinner", "some music: {music}", "can we have {music}",
    ), ("Playing {target}.",), "music"),
    Intent("do-it", "pause_music", (
        "pause the music", "stop the music", "stop playing", "pause the song", "hold the music", "pause playback",
        "silence the music", "music off", "be quiet with that song", "halt the playlist", "no more music",
        "stop this song", "pause what is playing", "cut the music",
    ), ("Music paused.",)),
    Intent("do-it", "set_timer", (
        "set a timer for {duration}", "timer for {duration}", "start a timer of {duration}", "count down {duration}",
        "give me {duration} on the timer", "set the timer to {duration}", "a {duration} timer",
        "tell me when {duration} are over", "start counting {duration}", "ring after {duration}",
        "put {duration} on the clock", "begin a countdown of {duration}", "wake me from my nap in {duration}",
    ), ("Timer set for {target}.",), "duration"),
    Intent("do-it", "create_reminder", (
        "remind me to {task}", "set a reminder to {task}", "add a reminder: {task}", "i have to remember to {task}",
        "put {task} on my reminders", "make me remember to {task}", "reminder: {task}", "create a reminder to {task}",
        "don't let me forget to {task}", "add {task} to my to-do list", "new reminder, {task}",
        "i should not forget to {task}", "to-do: {task}",
    ), ("I will remind you to {target}.",), "task"),
    Intent("do-it", "create_note", (
        "make a note: {text}", "note that {text}", "write down {text}", "new note: {text}", "take a note: {text}",
        "create a note saying {text}", "jot down {text}", "save a note: {text}", "add a note that says {text}",
        "put this in a note: {text}", "write a note: {text}", "keep in my notes that {text}", "memo: {text}",
    ), ("Noted.",), "text"),
    Intent("do-it", "open_folder", (
        "open the {folder} folder", "show me the folder {folder}", "go to my {folder} folder", "open folder {folder}",
        "show the {folder} folder", "take me to the {folder} folder", "browse the {folder} folder",
        "look into the {folder} folder", "what is in the {folder} folder", "display the folder {folder}",
        "bring up the {folder} folder", "open my {folder} directory", "let me see the {folder} folder",
    ), ("Opening the folder {target}.",), "folder"),
    Intent("do-it", "open_website", (
        "open {site}", "go to {site}", "visit {site}", "open the website {site}", "show me {site}", "browse to {site}",
        "take me to {site}", "load {site}", "i want to see {site}", "open the page {site}", "get {site} in the browser",
        "pull up {site}", "surf to {site}", "call up the site {site}",
    ), ("Going to {target}.",), "site"),
    Intent("do-it", "open_file", (
        "open {file}", "open the file {file}", "show me {file}", "display {file}", "i want to see {file}",
        "load {file}",
        "bring up {file}", "let me read {file}", "open up the document {file}", "pull up {file}", "view {file}",
        "i need to look at {file}", "get me {file}",
    ), ("Opening {target}.",), "file"),
    Intent("do-it", "take_screenshot", (
        "take a screenshot", "make a screenshot", "capture the screen", "screenshot", "take a picture of the screen",
        "grab the screen", "snap the screen", "save what is on the screen", "get a screenshot",
        "record a still of my screen",
        "photograph the display", "do a screen capture", "i need a screenshot",
    ), ("Screenshot taken.",)),
    Intent("do-it", "lock_screen", (
        "lock the screen", "lock my mac", "lock the computer", "lock it up while i'm gone", "lock this machine",
        "put the lock screen on", "lock", "secure the screen", "lock my session", "activate the lock screen",
        "i'm leaving my desk, lock the mac", "screen lock", "show the login lock", "protect my mac while i am out",
        "i step out for a minute, lock up", "ask for my password again", "keep others out of my mac",
        "make the mac safe, i'm going to lunch", "guard the screen",
    ), ("Locking the screen.",)),
    Intent("do-it", "turn_on", (
        "turn on {switch}", "switch on {switch}", "enable {switch}", "turn {switch} on", "activate {switch}",
        "switch {switch} on", "put {switch} on", "start {switch}", "i want {switch} on", "set {switch} to on",
        "i need {switch}", "make {switch} active", "get {switch} working",
    ), ("{target} is on.",), "switch"),
    Intent("do-it", "turn_off", (
        "turn off {switch}", "switch off {switch}", "disable {switch}", "turn {switch} off", "deactivate {switch}",
        "switch {switch} off", "put {switch} off", "stop {switch}", "i want {switch} off", "set {switch} to off",
        "no more {switch}", "make {switch} inactive", "i don't need {switch}",
    ), ("{target} is off.",), "switch"),
)  # fmt: skip

DESTRUCTIVE = (
    Intent("destructive", "delete_file", (
        "delete {file}", "remove {file}", "delete the file {file}", "erase {file}", "throw away {file}", "trash {file}",
        "get rid of {file}", "move {file} to the trash", "i don't need {file} any more", "wipe {file}",
        "discard {file}",
        "delete {file} for ever", "bin {file}", "drop {file}", "remove the file {file} from my mac",
        "{file} is rubbish, delete it", "{file} is no longer needed",
        "make {file} disappear", "scrap {file}", "away with {file}", "{file} belongs in the trash",
        "delete that old {file}", "nobody needs {file}",

    ), ("Delete {target}?",), "file", True),
    Intent("destructive", "empty_trash", (
        "empty the trash", "clear the trash", "empty the bin", "delete everything in the trash", "clean out the trash",
        "take out the trash", "purge the trash", "empty trash", "wipe the trash can", "remove all items from the bin",
        "flush the trash", "get rid of what is in the trash", "make the trash empty",
    ), ("Empty the trash?",), "", True),
    Intent("destructive", "shut_down", (
        "shut down", "shut down the mac", "turn off the computer", "power off", "switch off the mac",
        "shut the computer down",
        "turn the mac off", "power down the machine", "shutdown", "shut everything down", "switch the computer off",
        "turn this machine off", "end the day and power off",
    ), ("Shut down the Mac?",), "", True),
    Intent("destructive", "restart", (
        "restart", "restart the mac", "reboot", "reboot the computer", "restart this machine", "boot again",
        "do a restart", "start the mac again", "turn it off and on again", "reboot my mac", "restart the system",
        "cycle the power", "give the mac a fresh start",
    ), ("Restart the Mac?",), "", True),
    Intent("destructive", "log_out", (
        "log out", "log me out", "sign out", "end my session", "log out of this account", "sign me out of the mac",
        "log off", "sign off the user", "close my session", "exit my account", "logout", "leave my user account",
    ), ("Log out?",), "", True),
    Intent("destructive", "uninstall_app", (
        "uninstall {app}", "delete the app {app}", "remove {app} from my mac", "uninstall the app {app}",
        "get rid of the app {app}", "throw {app} off this computer", "erase the program {app}",
        "delete {app} completely",
        "take {app} off my mac", "wipe the app {app}", "i want {app} gone from the disk", "deinstall {app}",
        "remove the application {app}",
        "i will never use {app} again, remove it", "erase the app {app}",
        "delete the application {app}", "get the app {app} off this machine", "clear {app} off my computer",
        "remove the program {app} for ever", "purge the app {app}",

    ), ("Uninstall {target}?",), "app", True),
    Intent("destructive", "erase_disk", (
        "erase the disk {disk}", "format {disk}", "wipe {disk}", "erase {disk}", "clear the disk {disk}",
        "delete everything on {disk}", "reformat {disk}", "wipe the whole drive {disk}", "make {disk} empty",
        "remove all data from {disk}", "format the volume {disk}", "start over with a blank {disk}",
    ), ("Erase {target}?",), "disk", True),
)  # fmt: skip

AMBIGUOUS = (
    Intent("ambiguous", "ask", (
        "open it", "close that", "delete this", "open the file", "play it", "turn it on", "turn it off", "send it",
        "open that app", "start the program", "show me that", "remove it", "do it again", "move it", "rename it",
        "open the other one", "close the window over there", "the second one", "put it there", "change it", "that one",
        "open the document", "delete the old one", "make it bigger", "make it smaller", "turn that thing off",
        "save this somewhere", "use the usual one", "go there", "close those", "open my thing", "switch it",
        "erase that stuff", "open the folder", "show the picture", "quit the app", "throw the other one away",
        "show me what we talked about", "the same as last time", "bring back the last one", "not this one, the other",
        "finish it", "make it stop",
        "start it", "try the next one", "let me have that again", "close everything that i don't want",
        "do something with this", "take the one on the left", "fix that", "do what i said before",
        "load the last thing",
        "is it possible to open that", "show me the stuff from monday", "put those two together", "get rid of that",
    ), ("Which one do you mean?",)),
    Intent("ambiguous", "ask", (
        "set a timer", "start a timer", "remind me", "set a reminder", "make a note", "set the volume",
        "change the brightness", "start the countdown", "write something down", "make a reminder", "adjust the sound",
        "change the volume", "set the screen brightness", "set the clock", "remind me of something", "new note",
        "change the settings", "set an alarm", "start a countdown", "adjust the display", "note something",
        "the sound is wrong, change it", "change how bright it is", "the volume, please",
        "i want a reminder", "give me a timer", "i need a note", "let me have an alarm", "the screen is not right",
        "change the loudness", "fix the brightness",

    ), ("What should I set it to?",)),
)  # fmt: skip

OUT_OF_SCOPE = (
    Intent("out-of-scope", "refuse", (
        "order {food}", "book a flight to {city}", "what is the weather in {city}", "call {person}", "buy me {food}",
        "find me a hotel in {city}", "transfer money to {person}", "drive me to {city}", "get a taxi to {city}",
        "translate this letter", "write my essay", "who won the game", "what is the price of gold", "cook dinner",
        "wash the dishes", "pay my taxes", "book a table for two", "send {person} a message", "email {person}",
        "what is the capital of france", "solve this equation", "how tall is mount everest", "do my homework",
        "tell me the news", "water the garden", "walk the dog", "rent a car in {city}", "buy train tickets to {city}",
        "print me some money", "check my heart rate", "give me legal advice", "diagnose my cough", "sell my shares",
        "how far is it to {city}", "what will the weather be tomorrow", "reserve a room in {city}",
        "order a book online",
        "turn on the heating", "open the garage", "lock the front door", "turn off the kitchen light", "feed my fish",
        "start the dishwasher", "start the washing machine", "who is the president", "calculate my mortgage",
        "text {person} that i am late", "ring {person}", "buy concert tickets", "have {food} delivered",
        "write a poem about the sea", "how do i bake bread", "find me a doctor", "what time is it in {city}",
        "how much is a euro in dollars", "plan a trip to {city}", "invest my savings", "pick up the children",
        "sing me something you made up", "paint a picture of {city}", "invent a story",
        "make me a sandwich", "cut my hair", "iron my shirts", "teach me the violin",
        "who invented the telephone", "what does this word mean", "predict the future", "find my lost keys",
        "clean the bathroom", "tell {person} to come home", "babysit tonight", "choose my outfit", "fly me to {city}",

    ), ("I can't do that from here.",)),
)  # fmt: skip

PLAIN_TALK = (
    Intent("plain-talk", "talk", (
        "hello", "hi", "good morning", "good evening", "hi there", "hello computer", "good day", "greetings", "hey",
        "nice to meet you", "good afternoon", "hello again",
        "hi computer", "evening", "a very good morning to you", "hello mac", 
        "here i am", "i'm back", "hi, it's me", "anybody in", "hello, are you listening", "welcome back",

    ), ("Hello! What can I do for you?",)),
    Intent("plain-talk", "talk", (
        "thank you", "thanks", "thanks a lot", "thank you very much", "many thanks", "that was helpful", "well done",
        "good job", "great work", "you are great", "perfect", "nice one", "that's exactly right", "i like you",
        "that was fast", "i'm impressed", "excellent", "brilliant", "you did well", "thank you so much",
        "very kind of you", "i owe you one", "what would i do without you", "wonderful, thanks", "bravo",

    ), ("You're welcome.",)),
    Intent("plain-talk", "talk", (
        "how are you", "how do you feel", "are you okay", "how is it going", "what's up", "how was your day",
        "are you happy", "are you tired", "do you sleep", "are you busy",
        "are you feeling well", "everything fine with you", "how have you been", "how was your weekend",
        "do you ever get bored", "are you in a good mood", "did you have a nice morning", "do you like music",
        "do you have friends", "do you dream", "is everything all right with you", "are you cold in there",

    ), ("I'm fine, thank you.",)),
    Intent("plain-talk", "talk", (
        "who are you", "what are you", "what is your name", "are you a robot", "are you human", "what can you do",
        "who made you", "do you have a name", "are you real", "tell me about yourself", "introduce yourself",
        "do you have a brain", "who is talking there", "what kind of program are you",
        "where do you come from", "how old are you", "are you a person", "which assistant is this", "what's your job",
        "how do you work", "have you got a name", "who am i talking with", "what is it that you do",

    ), ("I'm the assistant on this Mac.",)),
    Intent("plain-talk", "talk", (
        "good night", "bye", "goodbye", "see you later", "see you tomorrow", "that is all", "i'm going to bed",
        "talk to you later", "so long", "farewell", "until tomorrow",
        "i have to run", "bye for now", "see you next week", "good night and sleep well", "i'm done for today",
        "that's it for tonight", "have a nice evening", "ciao", "i am leaving", "catch you later", "enjoy your day",
        "time for bed", "we'll speak again soon", "i'm heading home",

    ), ("See you soon.",)),
    Intent("plain-talk", "talk", (
        "i am bored", "i am sad", "i had a bad day", "i am so tired", "i am happy today", "i feel lonely",
        "work was awful today", "i am in a good mood", "i am hungry", "i am a bit nervous", "life is hard",
        "today was wonderful", "my head hurts", "i miss my friends",
        "my dog ran away", "i passed my driving test", "we lost the match", "i fell in love",
        "i could not sleep last night", "my boss shouted at me", "i got the job", "i am so excited", "i am worried",
        "it was a long week", "my daughter took her first steps", "i feel great", "everyone forgot my name",
        "i cannot stand mondays", "my back aches", "i am proud of my son", "nobody listens to me", "i won a prize",
        "the neighbours were loud again", "i cried at the film", "i burnt the dinner", "my plants died",

    ), ("I hear you. Tell me if I can help.",)),
)  # fmt: skip

INTENTS = DO_IT + DESTRUCTIVE + AMBIGUOUS + OUT_OF_SCOPE + PLAIN_TALK
